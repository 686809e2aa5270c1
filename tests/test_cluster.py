"""The files for clusters: Ray's and KubeRay's schemas, one set of versions, what a job uploads."""

import copy
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray._private.runtime_env.packaging import create_package
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]
CLUSTERS = ["gpu.yaml", "gpu-gcp.yaml"]
KUBERAY = {"rayservice.yaml": "rayClusterConfig", "rayjob.yaml": "rayClusterSpec"}
MAX_UPLOAD_BYTES = 100 * 2**20  # What the Jobs API takes.

# Fields of KubeRay's ray.io/v1 types that our files may use; its API refuses or drops others.
FIELDS = {
    "RayService": {"serveConfigV2", "rayClusterConfig"},
    "RayJob": {
        "entrypoint",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
        "backoffLimit",
        "rayClusterSpec",
    },
    "cluster": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"},
    "head": {"rayStartParams", "template"},
    "worker": {
        "groupName",
        "replicas",
        "minReplicas",
        "maxReplicas",
        "rayStartParams",
        "template",
    },
}


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "cluster" / name).read_text(encoding="utf-8"))


def list_pins() -> dict[str, str]:
    """Exact versions in pyproject.toml by package, extras aside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    pins = [re.fullmatch(r"([\w-]+)(?:\[.*\])?==([\d.]+)", line) for each in lists for line in each]
    return {pin[1]: pin[2] for pin in pins if pin}


def list_groups(cluster: dict[str, Any]) -> list[tuple[set[str], dict[str, Any]]]:
    workers = [(FIELDS["worker"], group) for group in cluster["workerGroupSpecs"]]
    return [(FIELDS["head"], cluster["headGroupSpec"]), *workers]


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_the_cluster_files(name: str) -> None:
    validate_config(prepare_config(load(name)))


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_refuses_them_broken(name: str) -> None:
    misspelt, too_few, nameless = (load(name) for _ in range(3))
    misspelt["idle_timeout"] = misspelt.pop("idle_timeout_minutes")
    too_few["available_node_types"]["head"]["resources"] = {"GPU": "two"}
    nameless["head_node_type"] = "headd"
    for broken in (misspelt, too_few):
        with pytest.raises(jsonschema.ValidationError):
            validate_config(prepare_config(broken))
    with pytest.raises(ValueError, match="head_node_type"):
        validate_config(prepare_config(nameless))


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_are_closed_and_mount_what_the_project_needs(name: str) -> None:
    config = load(name)
    options = config["docker"]["run_options"]
    mounts = config["file_mounts"]
    assert "-e RAY_AUTH_MODE=token" in options
    (token,) = [o.partition("RAY_AUTH_TOKEN_PATH=")[2] for o in options if "TOKEN_PATH" in o]
    assert mounts.pop(token) == "~/.ray/auth_token"
    assert all((ROOT / local).exists() for local in mounts.values())
    assert {Path(local).name for local in mounts.values()} == set(list_image_parts())
    (start,) = [line for line in config["head_start_ray_commands"] if "ray start" in line]
    assert "--dashboard-host=127.0.0.1" in start
    node = config["available_node_types"]["head"]["node_config"]
    # Without these two, Ray takes a network that is open to the world at port 22.
    assert node.get("SecurityGroupIds") or node.get("networkInterfaces")
    assert "0.0.0.0" not in (ROOT / "cluster" / name).read_text(encoding="utf-8")


def list_image_parts() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    return [line[1:] for line in lines if line.startswith("!")]


def test_every_version_is_that_of_pyproject() -> None:
    ray = list_pins()["ray"]
    images = [load(name)["docker"]["image"] for name in CLUSTERS]
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    images += re.findall(r"^FROM (.+)$", dockerfile, re.M)
    assert set(images) == {f"rayproject/ray:{ray}-py311-gpu"}
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    assert project["requires-python"] == ">=3.11"
    for name, key in KUBERAY.items():
        assert load(name)["spec"][key]["rayVersion"] == ray
    files = [*(ROOT / "cluster").iterdir(), ROOT / "Dockerfile", ROOT / "docs/deploy.md"]
    for path in files:
        tags = re.findall(r"/d3d-ray:([\w.]+)", path.read_text(encoding="utf-8"))
        assert set(tags) <= {project["version"]}, path
    extras = set(project["optional-dependencies"])
    for install in [dockerfile, *(load(name)["setup_commands"][0] for name in CLUSTERS)]:
        (names,) = re.findall(r"\[([\w,]+)\]'", install)
        assert set(names.split(",")) <= extras


@pytest.mark.parametrize("name", KUBERAY)
def test_kuberay_files_have_its_form(name: str) -> None:
    resource = load(name)
    assert find_faults(resource) == []
    for break_it in (misspell_a_field, ask_for_more_than_the_limit, forget_the_volume, open_it):
        broken = copy.deepcopy(resource)
        break_it(broken["spec"][KUBERAY[name]])
        assert find_faults(broken), break_it.__name__


def find_faults(resource: dict[str, Any]) -> list[str]:
    """What is wrong with a RayService or RayJob, judged by its structure."""
    kind, spec = resource["kind"], resource["spec"]
    cluster = spec["rayClusterConfig" if kind == "RayService" else "rayClusterSpec"]
    faults = [f"{kind}.{key}" for key in set(spec) - FIELDS[kind]]
    faults += [f"cluster.{key}" for key in set(cluster) - FIELDS["cluster"]]
    if resource["apiVersion"] != "ray.io/v1":
        faults.append("apiVersion")
    if cluster.get("authOptions") != {"mode": "token", "secretName": "d3d-ray-token"}:
        faults.append("no token")
    for fields, group in list_groups(cluster):
        faults += [f"group.{key}" for key in set(group) ^ fields]
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            faults += [f"volume {lost}" for lost in mounts ^ volumes]
            resources = container["resources"]
            if resources["requests"] != resources["limits"]:
                faults.append(f"{container['name']}: requests are not the limits")
            if any(probe in container for probe in ("readinessProbe", "livenessProbe")):
                faults.append(f"{container['name']}: replaces the probes of KubeRay")
    worker = cluster["workerGroupSpecs"][0]["template"]["spec"]
    gpus = worker["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", "0")
    if int(gpus) < 2:
        faults.append("fewer than two GPUs on the node")
    if not any(v.get("emptyDir", {}).get("medium") == "Memory" for v in worker["volumes"]):
        faults.append("the shared memory of a pod is 64 MB unless it is mounted")
    return faults


def misspell_a_field(cluster: dict[str, Any]) -> None:
    cluster["workerGroupSpec"] = cluster.pop("headGroupSpec") and cluster["workerGroupSpecs"]
    cluster["headGroupSpec"] = {"template": cluster["workerGroupSpecs"][0]["template"]}


def ask_for_more_than_the_limit(cluster: dict[str, Any]) -> None:
    container = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["resources"]["requests"]["cpu"] = "100"


def forget_the_volume(cluster: dict[str, Any]) -> None:
    cluster["workerGroupSpecs"][0]["template"]["spec"]["volumes"].pop()


def open_it(cluster: dict[str, Any]) -> None:
    cluster.pop("authOptions")


def test_what_kubernetes_starts_exists() -> None:
    (application,) = yaml.safe_load(load("rayservice.yaml")["spec"]["serveConfigV2"])[
        "applications"
    ]
    assert application["import_path"] == "d3d_ray.serving:build_app"
    preset = application["args"]["preset"]
    assert (ROOT / f"d3d_ray/presets/{preset}.yaml").is_file()
    words = load("rayjob.yaml")["spec"]["entrypoint"].split()
    workdir = re.findall(r"^WORKDIR (.+)$", (ROOT / "Dockerfile").read_text("utf-8"), re.M)
    assert (ROOT / Path(words[1]).relative_to(workdir[0])).is_file()
    recipe = words[words.index("--config") + 1]
    assert (ROOT / f"d3d_ray/training/recipes/{recipe}.yaml").is_file()


def pack(folder: Path, package: Path) -> list[str]:
    """Names of the files that ``ray job submit --working-dir folder`` would upload."""
    create_package(str(folder), package, include_gitignore=True)
    return zipfile.ZipFile(package).namelist()


def test_a_job_uploads_the_project_and_fits(tmp_path: Path) -> None:
    names = pack(ROOT, tmp_path / "package.zip")
    assert (tmp_path / "package.zip").stat().st_size < MAX_UPLOAD_BYTES
    drafter = sorted((ROOT / "d3d_ray/drafters").glob("*/*.safetensors"))
    assert drafter
    assert {str(path.relative_to(ROOT)) for path in drafter} <= set(names)
    assert {"jobs/generate.py", "d3d_ray/runtime/engine.py"} <= set(names)


def test_a_job_uploads_no_weights_and_no_environment(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    kept = ["jobs/a.py", "d3d_ray/drafters/d/model.safetensors"]
    left = [
        ".venv/lib/x.py",
        ".git/objects/x",
        "checkpoints/step/x.pt",
        "big.safetensors",
        "m.gguf",
    ]
    for name in kept + left:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    for name in (".rayignore", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    names = [name for name in pack(folder, tmp_path / "package.zip") if not name.endswith("ignore")]
    assert sorted(names) == sorted(kept)


def test_deploy_guide_names_files_that_exist() -> None:
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:cluster|jobs)/[\w-]+\.\w+", text))
    named -= {"jobs/serve.py"}
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.fixture
def local(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment in which cluster/local.sh disturbs no other Ray; stopped in the end."""
    sockets = [socket.socket() for _ in range(4)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    names = ["PORT", "DASHBOARD_PORT", "AGENT_PORT", "CLIENT_PORT"]
    ports = {name: str(s.getsockname()[1]) for name, s in zip(names, sockets, strict=True)}
    for each in sockets:
        each.close()
    # Short: the paths of Ray's sockets must not exceed 107 characters.
    folder = Path(f"/tmp/d3d-test-{os.getpid()}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | ports | {"D3D_RAY_DIR": str(folder), "PATH": path}
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE"):
        env.pop(name, None)
    yield env
    run(env, "stop")


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "cluster/local.sh", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.ray
@pytest.mark.slow
def test_local_cluster_starts_once_and_stop_leaves_nothing(local: dict[str, str]) -> None:
    options = ("--num-cpus", "1", "--object-store-memory", "100000000")
    first = run(local, "start", *options)
    assert first.returncode == 0, first.stderr
    assert "ray job submit" in first.stdout
    pid = (Path(local["D3D_RAY_DIR"]) / "pid").read_text()
    assert run(local).stdout == first.stdout
    assert (Path(local["D3D_RAY_DIR"]) / "pid").read_text() == pid
    beside = run(local | {"D3D_RAY_DIR": local["D3D_RAY_DIR"] + "-b"})
    assert beside.returncode == 1
    assert f"Port {local['PORT']} is taken" in beside.stderr
    assert "RAY_AUTH_TOKEN_PATH" in run(local, "env").stdout
    assert run(local, "stop").returncode == 0
    assert not Path(local["D3D_RAY_DIR"]).exists()
    assert list_marked(local["D3D_RAY_DIR"]) == []


def list_marked(folder: str) -> list[str]:
    marked = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"D3D_RAY_LOCAL={folder}".encode() in path.read_bytes():
                marked.append(path.parent.name)
        except OSError:
            continue  # It ended, or belongs to another user.
    return marked


def test_local_cluster_removes_no_folder_of_others(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    env = os.environ | {"D3D_RAY_DIR": str(tmp_path)}
    assert "remove it, or set D3D_RAY_DIR" in run(env).stderr
    assert run(env, "stop").returncode == 0
    assert (tmp_path / "mine.txt").exists()
    assert "Usage" in run(env, "restart").stderr
