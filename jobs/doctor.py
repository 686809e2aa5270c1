"""Preflight: what this machine can run, what is wrong, and what to do about it.

python jobs/doctor.py --preset smollm2-cpu --set decode.max_draft_rows=32 --json report.json
python jobs/doctor.py --gpu-check --json gpu.json

The exit code: 0 nothing failed, 1 something did, 2 bad arguments, 3 no GPU for --gpu-check.
"""

import sys
from collections.abc import Sequence

from d3d_ray.bench.options import output_file
from d3d_ray.command_line import Parser, run_job
from d3d_ray.config import list_presets, load_config, to_dict


def run(arguments: Sequence[str]) -> int:
    parser = Parser(description="Check what this machine can run.")
    add = parser.add_argument
    add("--preset", default="smollm2-cpu", help=f"YAML file, or {', '.join(list_presets())}")
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override")
    add("--json", type=output_file, metavar="FILE", help="write all of it")
    add("--no-curves", action="store_true", help="load no weights and time no model")
    add("--gpu-check", action="store_true", help="check the GPU path; exit 3 = there is no GPU")
    add("--seconds", type=float, default=280.0, help="time budget of --gpu-check")
    args = parser.parse_args(arguments)
    config = load_config(args.preset, args.set)
    # These take seconds to import; bad arguments are refused before.
    import torch

    from d3d_ray.bench.check import report
    from d3d_ray.bench.doctor import examine
    from d3d_ray.bench.gpu_check import FULL, gpu_check

    if not args.gpu_check:
        checks = examine(config, with_curves=not args.no_curves)
        return report(checks, args.json, config=to_dict(config))
    if not torch.cuda.is_available():
        print("no GPU here: torch finds no CUDA device, so nothing was checked")
        report([], args.json, gpu=False)
        return 3
    checks = gpu_check(FULL, device=torch.device("cuda:0"), seconds=args.seconds)
    return report(checks, args.json, gpu=True)


if __name__ == "__main__":
    sys.exit(run_job(run, None))
