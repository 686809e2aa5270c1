"""Copy a trained drafter, smaller: weight matrices in 8 bits, in files that pass size limits.

python jobs/export.py --drafter checkpoints/a/drafter --output drafter-8 --bits 8 --target SOURCE

With --target, embeddings and head are left out where they are the target's; a drafter that was
stored without them needs it, as a DFlash drafter does. Prints what the folder weighs and how far a
matrix is off.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from d3d_ray.command_line import Parser, run_job


def export(arguments: Sequence[str]) -> int:
    parser = Parser(description="Copy a drafter, smaller.")
    add = parser.add_argument
    add("--drafter", required=True, metavar="FOLDER", help="as the trainer wrote it")
    add("--output", required=True, type=Path, metavar="FOLDER", help="a new one")
    add("--bits", type=int, choices=[8], help="of weight matrices; otherwise as they are")
    add("--target", metavar="SOURCE", help="folder, hub name or embedded:NAME")
    add("--max-shard-mb", type=int, default=40, metavar="N", help="split files at N MB")
    args = parser.parse_args(arguments)
    if args.output.exists() and not (args.output.is_dir() and not any(args.output.iterdir())):
        raise ValueError(f"--output {args.output} is there already: give a new folder")
    if args.max_shard_mb < 1:
        raise ValueError(f"--max-shard-mb must be at least 1, not {args.max_shard_mb}")
    # These take seconds to import; bad arguments are refused before.
    from d3d_ray.models.export import copy_drafter_folder

    error = copy_drafter_folder(
        args.drafter,
        args.output,
        target=args.target,
        bits=args.bits,
        max_shard_mb=args.max_shard_mb,
    )
    sizes = [file.stat().st_size / 1e6 for file in args.output.iterdir()]
    print(f"{args.output}: {sum(sizes):.1f} MB, the largest file {max(sizes):.1f} MB")
    print(f"largest relative error of a tensor: {error:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(run_job(export, None))
