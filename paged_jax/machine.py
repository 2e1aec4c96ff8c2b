"""What this machine is: plain facts for `paged_jax.doctor`, gathered without importing JAX here."""

import importlib.metadata
import json
import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paged_jax.cache import cache_dir
from paged_jax.errors import ConfigError

__all__ = ["Device", "Folder", "Holder", "JaxProbe", "LockFile", "Machine", "inspect_machine"]

PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "flax",
    "orbax-checkpoint",
    "numpy",
    "tokenizers",
    "starlette",
    "uvicorn",
)
PROBE_TIMEOUT_S = 90.0
# PCI ids under Google's vendor id that are TPUs: its network cards and disks bear that id as well.
GOOGLE, NVIDIA = "0x1ae0", "0x10de"
TPU_GENERATIONS = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}


@dataclass(frozen=True)
class Device:
    """One device as JAX sees it; `memory_bytes` is None where it does not say."""

    kind: str
    memory_bytes: int | None


@dataclass(frozen=True)
class JaxProbe:
    """What a fresh process said that started JAX and multiplied two matrices on each device."""

    backend: str | None  # None: it did not come up
    devices: tuple[Device, ...] = ()
    said: str = ""  # the end of its standard error
    attention: str = ""  # which attention back end `auto` takes here, and why
    timed_out: bool = False


@dataclass(frozen=True)
class Holder:
    """A process that has an accelerator's device file open."""

    device: str
    pid: int
    command: str
    user: str


@dataclass(frozen=True)
class LockFile:
    """The file by which libtpu keeps a second process away from the TPU."""

    path: str
    owner: str
    mine: bool


@dataclass(frozen=True)
class Folder:
    """A cache folder; `problem` says why it cannot be used, or nothing."""

    path: str
    size_bytes: int = 0
    num_files: int = 0
    free_bytes: int = 0
    problem: str = ""
    remote: bool = False  # an address: not looked into


@dataclass(frozen=True)
class Machine:
    """Everything that the doctor looks at."""

    python: str
    system: str
    num_cpus: int
    memory_bytes: int
    available_bytes: int
    versions: Mapping[str, str]  # installed packages only
    jax_requires: tuple[str, ...]  # requirement lines of the installed jax
    jax: JaxProbe
    jax_platforms: str  # the environment variable JAX_PLATFORMS
    tpu_generation: str | None
    num_tpu_chips: int
    num_gpus: int  # NVIDIA cards on the bus
    gpu_driver: bool
    holders: tuple[Holder, ...]
    sees_all_processes: bool
    tpu_lock: LockFile | None
    tpu_hosts: tuple[str, ...]  # every host of this TPU slice, where it says so
    compile_cache: Folder
    model_cache: Folder


def inspect_machine(root: Path = Path("/")) -> Machine:
    """Look around; takes a few seconds, most of them for starting JAX in a process of its own.

    `root` is where /dev, /proc, /sys and /tmp are read.
    """
    memory = read_meminfo(root / "proc/meminfo")
    tpus = tuple(tpu_chips(root / "sys/bus/pci/devices"))
    gpus = sum(1 for _ in nvidia_gpus(root / "sys/bus/pci/devices"))
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        versions=installed_versions(),
        jax_requires=jax_requirements(),
        holders=tuple(holders(root)),  # before JAX starts and becomes one
        jax=probe_jax(),
        jax_platforms=os.environ.get("JAX_PLATFORMS", ""),
        tpu_generation=tpus[0] if tpus else None,
        num_tpu_chips=len(tpus),
        num_gpus=gpus,
        gpu_driver=(root / "proc/driver/nvidia/version").exists(),
        sees_all_processes=os.geteuid() == 0,
        tpu_lock=tpu_lock(root / "tmp/libtpu_lockfile"),
        tpu_hosts=tpu_hosts(os.environ, ask_metadata=bool(tpus)),
        compile_cache=compile_cache_folder(os.environ),
        model_cache=cache_folder("models"),
    )


def read_meminfo(path: Path) -> dict[str, int]:
    """Bytes by field of /proc/meminfo; empty where there is none."""
    if not path.exists():
        return {}
    fields = re.findall(r"^(\w+): +(\d+) kB$", path.read_text(), re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in fields}


def installed_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def jax_requirements() -> tuple[str, ...]:
    try:
        return tuple(importlib.metadata.requires("jax") or ())
    except importlib.metadata.PackageNotFoundError:
        return ()


_PROBE = """
import json, jax, jax.numpy as jnp
from pallas_kernels import choose_backend
devices = jax.local_devices()
for device in devices:
    jnp.dot(*[jax.device_put(jnp.ones((8, 8)), device)] * 2).block_until_ready()
print(json.dumps([jax.default_backend(), [
    [device.device_kind, (device.memory_stats() or {}).get("bytes_limit")] for device in devices
], choose_backend("auto", devices[0].device_kind)[1]]))
"""


def probe_jax(code: str = _PROBE, timeout_s: float = PROBE_TIMEOUT_S) -> JaxProbe:
    """Start JAX in a fresh process: it may hang where a TPU's other hosts are silent."""
    # Without the last setting the probe would take most of a GPU's memory for a moment.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else ""
        return JaxProbe(None, said=last_lines(said), timed_out=True)
    if done.returncode != 0:
        return JaxProbe(None, said=last_lines(done.stderr))
    backend, devices, attention = json.loads(done.stdout.splitlines()[-1])
    return JaxProbe(
        backend,
        tuple(Device(*device) for device in devices),
        last_lines(done.stderr),
        attention=attention,
    )


def last_lines(text: str, count: int = 3) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def tpu_chips(pci: Path) -> Iterator[str]:
    """The generation of each TPU chip on the PCI bus."""
    for vendor in pci.glob("*/vendor"):
        if vendor.read_text().strip() == GOOGLE:
            device = vendor.with_name("device").read_text().strip()
            if device in TPU_GENERATIONS:
                yield TPU_GENERATIONS[device]


def nvidia_gpus(pci: Path) -> Iterator[Path]:
    """The folder of each NVIDIA display or compute card (class 0x03....) on the PCI bus."""
    for vendor in pci.glob("*/vendor"):
        is_display = vendor.with_name("class").read_text().startswith("0x03")
        if is_display and vendor.read_text().strip() == NVIDIA:
            yield vendor.parent


def holders(root: Path) -> Iterator[Holder]:
    """Every process, as far as we may look, that has a TPU's or a GPU's device file open."""
    is_accelerator = re.compile(r"/dev/(accel\d+|vfio/\d+|nvidia\d+)$").search
    for process in sorted((root / "proc").glob("[0-9]*")):
        try:
            targets = {os.readlink(file) for file in (process / "fd").iterdir()}
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            user = user_name(process.stat().st_uid)
        except OSError:  # gone meanwhile, or another user's
            continue
        for device in sorted(filter(is_accelerator, targets)):
            yield Holder(device, int(process.name), command[:80], user)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def tpu_lock(path: Path) -> LockFile | None:
    try:
        uid = path.stat().st_uid
    except OSError:
        return None
    return LockFile(str(path), user_name(uid), mine=os.geteuid() in (0, uid))


def tpu_hosts(environment: Mapping[str, str], *, ask_metadata: bool) -> tuple[str, ...]:
    """The hosts of this TPU slice: from the environment (GKE) or the metadata server (TPU VMs)."""
    if names := environment.get("TPU_WORKER_HOSTNAMES"):
        return tuple(name.strip() for name in names.split(","))
    if not ask_metadata:
        return ()
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/worker-network-endpoints",
        headers={"Metadata-Flavor": "Google"},
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            endpoints = answer.read().decode()
    except (OSError, urllib.error.URLError):
        return ()
    # Each endpoint reads "worker id:unused:address".
    return tuple(endpoint.split(":")[-1] for endpoint in endpoints.strip().split(","))


def compile_cache_folder(environment: Mapping[str, str]) -> Folder:
    """Where compiled programs are kept: JAX's own setting goes before the user's cache."""
    if named := environment.get("JAX_COMPILATION_CACHE_DIR"):
        return Folder(named, remote=True) if "://" in named else measure_folder(Path(named))
    return cache_folder("xla")


def cache_folder(name: str) -> Folder:
    """The folder `name` of the user's cache."""
    try:
        return measure_folder(cache_dir() / name)
    except ConfigError as error:
        return Folder(path=name, problem=str(error))


def measure_folder(path: Path) -> Folder:
    """A folder, made if missing and tried by writing to it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        trial = path / f".doctor-{os.getpid()}"
        trial.write_bytes(b"")
        trial.unlink()
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    except OSError as error:
        return Folder(str(path), problem=f"{path} cannot be written: {error.strerror}")
    return Folder(str(path), sum(sizes), len(sizes), shutil.disk_usage(path).free)
