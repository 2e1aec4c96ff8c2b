"""`paged-jax doctor`: what stands between this machine and a served model, and what to do."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from paged_jax.machine import Folder, Holder, Machine, inspect_machine

__all__ = ["Finding", "diagnose", "report", "run_doctor"]

GIB = 2**30
BLOCKED = 3  # the exit code when something blocks

Level = Literal["ok", "note", "warning", "blocker"]


@dataclass(frozen=True)
class Finding:
    """One thing the doctor found; `advice` says what to do about it."""

    level: Level
    what: str
    advice: str = ""


def run_doctor() -> int:
    """Look, print, and return the exit code: 0, or 3 when something blocks."""
    findings = diagnose(inspect_machine())
    print(report(findings))
    return BLOCKED if any(finding.level == "blocker" for finding in findings) else 0


def report(findings: tuple[Finding, ...]) -> str:
    lines = []
    for finding in findings:
        first, *rest = finding.what.splitlines()
        lines.append(f"{finding.level:>8}  {first}")
        lines += [f"{'':8}  | {line}" for line in rest]
        lines += [f"{'':8}  -> {line}" for line in finding.advice.splitlines()]
    blockers = sum(finding.level == "blocker" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if blockers:
        lines.append(f"\n{blockers} thing{'s' * (blockers > 1)} must be put right first.")
    elif warnings:
        lines.append("\nNothing blocks; the warnings above are worth a look.")
    else:
        lines.append("\nAll is well.")
    return "\n".join(lines)


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """What the facts mean, in the order in which to read it."""
    checks: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
        _computer,
        _packages,
        _pairing,
        _jax,
        _fallback,
        _tpu_in_use,
        _tpu_lock,
        _tpu_hosts,
        _gpu_shared,
        _caches,
    )
    return tuple(finding for check in checks for finding in check(machine))


def _size(size_bytes: int) -> str:
    if size_bytes < GIB // 2:
        return f"{size_bytes / 2**20:.0f} MiB"
    return f"{size_bytes / GIB:.1f} GiB"


def _computer(machine: Machine) -> Iterator[Finding]:
    yield Finding(
        "ok",
        f"Python {machine.python} on {machine.system}, {machine.num_cpus} CPUs, "
        f"{_size(machine.memory_bytes)} of memory ({_size(machine.available_bytes)} available)",
    )
    if 0 < machine.available_bytes < 2 * GIB:
        yield Finding(
            "warning",
            f"only {_size(machine.available_bytes)} of memory is available; the smallest model "
            "wants about 2 GiB",
            "Close other programs, or limit the engine with --max-model-len and --num-blocks.",
        )


def _packages(machine: Machine) -> Iterator[Finding]:
    named = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    yield Finding("ok", named or "no package of ours is installed")
    for name in ("jax", "jaxlib", "flax"):
        if name not in machine.versions:
            yield Finding("blocker", f"{name} is not installed", "pip install paged-jax")


def _pairing(machine: Machine) -> Iterator[Finding]:
    """The installed jax says itself which jaxlib, libtpu and CUDA plugin it goes with."""
    jax = machine.versions.get("jax")
    for name, extra in [
        ("jaxlib", ""),
        ("libtpu", "tpu"),
        ("jax-cuda13-plugin", "cuda13"),
        ("jax-cuda12-plugin", "cuda12"),
    ]:
        version = machine.versions.get(name)
        wanted = required_version(machine.jax_requires, name, extra)
        if version is None or wanted is None or satisfies(version, wanted):
            continue
        brackets = f"[{extra}]" if extra else ""
        yield Finding(
            "blocker",
            f"{name} {version} does not go with jax {jax}, which wants {name}{wanted}",
            f'pip install --upgrade "jax{brackets}=={jax}"',
        )


def required_version(requirements: tuple[str, ...], name: str, extra: str) -> str | None:
    """The version specifier that a requirement line gives for `name` under `extra`, or None.

    >>> required_version(("libtpu==0.0.42.*; extra == 'tpu'",), "libtpu", "tpu")
    '==0.0.42.*'
    """
    for line in requirements:
        requirement, _, marker = line.partition(";")
        match = re.fullmatch(r"([\w-]+)(\[.*\])?\s*([<>=!~].*)", requirement.strip())
        found_extra = re.search(r"""extra\s*==\s*['"]([^'"]*)""", marker)
        if match and match[1] == name and (found_extra[1] if found_extra else "") == extra:
            return match[3].strip()
    return None


def satisfies(version: str, specifier: str) -> bool:
    """Whether a plain version meets every clause of a specifier such as `<=0.10.2,>=0.10.1`.

    >>> satisfies("0.10.2", "<=0.10.2,>=0.10.1"), satisfies("0.0.41", "==0.0.42.*")
    (True, False)
    """

    def numbers(text: str) -> tuple[int, ...]:
        release = [int(part) for part in re.findall(r"\d+", text)]
        while release and release[-1] == 0:
            release.pop()
        return tuple(release)

    for clause in specifier.split(","):
        match = re.fullmatch(r"\s*(==|!=|<=|>=|<|>)\s*(\S+?)(\.\*)?\s*", clause)
        if match is None:  # a kind of clause that jax does not use: no claim
            continue
        operator, wanted, star = match.groups()
        ours, theirs = numbers(version), numbers(wanted)
        if star:
            ours = ours[: len(theirs)]
        met = {
            "==": ours == theirs,
            "!=": ours != theirs,
            "<=": ours <= theirs,
            ">=": ours >= theirs,
            "<": ours < theirs,
            ">": ours > theirs,
        }
        if not met[operator]:
            return False
    return True


def _jax(machine: Machine) -> Iterator[Finding]:
    if machine.jax.timed_out:
        yield Finding(
            "blocker",
            f"JAX did not start in time\n{machine.jax.said}".strip(),
            "On a TPU slice of several hosts, JAX waits until it runs on all of them (see below).\n"
            "Otherwise another process may hold the accelerator.",
        )
    elif machine.jax.backend is None:
        yield Finding(
            "blocker",
            f"JAX could not start\n{machine.jax.said}".strip(),
            'Try `python -c "import jax; print(jax.devices())"`; reinstalling jax often helps.',
        )
    else:
        devices = machine.jax.devices
        sizes = [device.memory_bytes for device in devices if device.memory_bytes]
        memory = f", {_size(sizes[0])} each" if sizes else ""
        yield Finding(
            "ok", f"JAX runs on {machine.jax.backend}: {len(devices)} x {devices[0].kind}{memory}"
        )
        if len(devices) > 1:
            yield Finding(
                "ok",
                f"a model runs on one device, or over up to {len(devices)} of them with "
                "--tensor-parallel-size",
            )
        if machine.jax.attention:
            yield Finding("ok", f"attention back end {machine.jax.attention}")


def _fallback(machine: Machine) -> Iterator[Finding]:
    """An accelerator is there, and JAX runs on the CPU all the same."""
    if machine.jax.backend != "cpu" or not (machine.num_tpu_chips or machine.num_gpus):
        return
    kind = f"TPU {machine.tpu_generation}" if machine.num_tpu_chips else "GPU"
    if "cpu" in machine.jax_platforms.split(","):
        yield Finding(
            "note",
            f"this machine has a {kind}, and JAX_PLATFORMS={machine.jax_platforms} keeps JAX on "
            "the CPU",
            "unset JAX_PLATFORMS",
        )
        return
    jax = machine.versions.get("jax", "")
    plugin = "libtpu" if machine.num_tpu_chips else "jax-cuda13-plugin"
    extra = "tpu" if machine.num_tpu_chips else "cuda13"
    fell_back = f"this machine has a {kind}, but JAX fell back to the CPU\n{machine.jax.said}"
    if plugin not in machine.versions and "jax-cuda12-plugin" not in machine.versions:
        yield Finding(
            "blocker" if machine.num_tpu_chips else "warning",
            f"this machine has a {kind}, but {plugin} is not installed: JAX runs on the CPU",
            f'pip install "jax[{extra}]=={jax}"',
        )
    elif machine.num_gpus and not machine.gpu_driver:
        yield Finding(
            "blocker",
            fell_back.strip(),
            "The NVIDIA driver is not loaded: install it, and see that `nvidia-smi` works.",
        )
    else:
        yield Finding(
            "blocker",
            fell_back.strip(),
            "Another process may hold it, or its driver may be too old; see also below.\n"
            "To use the CPU on purpose: --device cpu",
        )


def _tpu_holders(machine: Machine) -> tuple[Holder, ...]:
    # /dev/vfio/* also hands other cards to virtual machines: without a TPU it says nothing of one.
    if not machine.num_tpu_chips:
        return ()
    return tuple(holder for holder in machine.holders if "nvidia" not in holder.device)


def _tpu_in_use(machine: Machine) -> Iterator[Finding]:
    for holder in _tpu_holders(machine):
        yield Finding(
            "blocker",
            f"{holder.device} is held by process {holder.pid} of {holder.user}: {holder.command}",
            f"A TPU serves one process at a time. If it is no longer wanted: kill {holder.pid}",
        )
    if machine.num_tpu_chips and not machine.sees_all_processes:
        yield Finding(
            "note",
            "processes of other users are hidden: one of them may hold the TPU",
            "sudo paged-jax doctor",
        )


def _tpu_lock(machine: Machine) -> Iterator[Finding]:
    lock = machine.tpu_lock
    if lock is None or not machine.num_tpu_chips or _tpu_holders(machine):
        return
    if not lock.mine:
        yield Finding(
            "blocker",
            f"{lock.path} belongs to {lock.owner}: libtpu takes the TPU to be in use",
            f"If no process of {lock.owner} uses the TPU: sudo rm {lock.path}",
        )
    elif machine.jax.backend != "tpu":
        yield Finding(
            "warning",
            f"{lock.path} is left over from a process that is gone",
            f"rm {lock.path}",
        )


def _tpu_hosts(machine: Machine) -> Iterator[Finding]:
    count = len(machine.tpu_hosts)
    if count > 1:
        yield Finding(
            "blocker" if machine.jax.timed_out else "warning",
            f"this TPU slice spans {count} hosts: JAX starts only when it runs on all of them",
            "Start the same program on every host:\n"
            "  gcloud compute tpus tpu-vm ssh NAME --worker=all --command='...'\n"
            "paged-jax serves from one host so far: a slice of one host is what it wants.",
        )


def _gpu_shared(machine: Machine) -> Iterator[Finding]:
    for holder in machine.holders:
        if "nvidia" in holder.device:
            yield Finding(
                "warning",
                f"{holder.device} is also used by process {holder.pid} of {holder.user}: "
                f"{holder.command}",
                "Its memory is not ours: stop it, or give the engine a smaller share with "
                "--memory-utilization",
            )


def _caches(machine: Machine) -> Iterator[Finding]:
    yield from _cache("compiled programs", machine.compile_cache)
    yield from _cache("models", machine.model_cache)


def _cache(what: str, folder: Folder) -> Iterator[Finding]:
    if folder.problem:
        yield Finding(
            "blocker",
            f"no place to keep {what}: {folder.problem}",
            "Name a folder of yours in PAGED_JAX_HOME.",
        )
        return
    if folder.remote:
        yield Finding("note", f"{what} are kept at {folder.path}, which was not looked into")
        return
    yield Finding(
        "ok",
        f"{what} are kept in {folder.path}: {folder.num_files} files, {_size(folder.size_bytes)}",
    )
    if folder.free_bytes < GIB:
        yield Finding(
            "warning",
            f"only {_size(folder.free_bytes)} of disk is free for {what}",
            f"Make room, or name another folder in PAGED_JAX_HOME. {folder.path} may be emptied.",
        )
