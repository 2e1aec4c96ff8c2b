"""The doctor: findings from made-up machines, and facts from made-up file trees."""

import http.server
import os
import threading
from dataclasses import replace

import pytest

from paged_jax import doctor, machine
from paged_jax.doctor import diagnose, report, required_version, satisfies
from paged_jax.machine import Device, Folder, Holder, JaxProbe, LockFile, Machine

GIB = 2**30
REQUIRES = (
    "jaxlib<=0.10.2,>=0.10.1",
    'libtpu==0.0.42.*; extra == "tpu"',
    'jax-cuda13-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda13"',
    'jaxlib==0.10.1; extra == "ci"',
)
LAPTOP = Machine(
    python="3.11.7",
    system="Linux x86_64",
    num_cpus=8,
    memory_bytes=16 * GIB,
    available_bytes=9 * GIB,
    versions={"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"},
    jax_requires=REQUIRES,
    jax=JaxProbe("cpu", (Device("cpu", None),)),
    jax_platforms="",
    tpu_generation=None,
    num_tpu_chips=0,
    num_gpus=0,
    gpu_driver=False,
    holders=(),
    sees_all_processes=False,
    tpu_lock=None,
    tpu_hosts=(),
    compile_cache=Folder("/cache/xla", 3 * GIB, 40, 90 * GIB),
    model_cache=Folder("/cache/models", GIB, 2, 90 * GIB),
)
TPU_VM = replace(
    LAPTOP,
    versions={**LAPTOP.versions, "libtpu": "0.0.42.1"},
    jax=JaxProbe("tpu", tuple(Device("TPU v5 lite", 16 * GIB) for _ in range(4))),
    tpu_generation="v5e",
    num_tpu_chips=4,
    sees_all_processes=True,
    tpu_lock=LockFile("/tmp/libtpu_lockfile", "ada", mine=True),
    tpu_hosts=("10.0.0.1",),
)
GPU_VM = replace(
    LAPTOP,
    versions={**LAPTOP.versions, "jax-cuda13-plugin": "0.10.2"},
    jax=JaxProbe("gpu", (Device("NVIDIA H100 80GB HBM3", 80 * GIB),)),
    num_gpus=1,
    gpu_driver=True,
)
ON_CPU = JaxProbe("cpu", (Device("cpu", None),), said="Falling back to cpu.")


@pytest.mark.parametrize("healthy", [LAPTOP, TPU_VM, GPU_VM], ids=["laptop", "tpu", "gpu"])
def test_a_healthy_machine_is_well(healthy):
    findings = diagnose(healthy)
    assert {finding.level for finding in findings} == {"ok"}
    assert report(findings).endswith("All is well.")


def test_it_says_which_attention_back_end_auto_takes_and_why():
    probe = replace(LAPTOP.jax, attention="xla: auto, no kernel is written for 'cpu'")
    text = report(diagnose(replace(LAPTOP, jax=probe)))
    assert "attention back end xla: auto, no kernel is written for 'cpu'" in text


SICK = {
    "little memory": (
        replace(LAPTOP, available_bytes=GIB),
        ("warning", "only 1.0 GiB of memory", "--max-model-len"),
    ),
    "no flax": (
        replace(LAPTOP, versions={"jax": "0.10.2", "jaxlib": "0.10.2"}),
        ("blocker", "flax is not installed", "pip install"),
    ),
    "old jaxlib": (
        replace(LAPTOP, versions={**LAPTOP.versions, "jaxlib": "0.9.0"}),
        ("blocker", "jaxlib 0.9.0 does not go with jax 0.10.2", '"jax==0.10.2"'),
    ),
    "old libtpu": (
        replace(TPU_VM, versions={**TPU_VM.versions, "libtpu": "0.0.17"}),
        ("blocker", "wants libtpu==0.0.42.*", '"jax[tpu]==0.10.2"'),
    ),
    "old CUDA plugin": (
        replace(GPU_VM, versions={**GPU_VM.versions, "jax-cuda13-plugin": "0.10.1"}),
        ("blocker", "jax-cuda13-plugin 0.10.1 does not go", '"jax[cuda13]==0.10.2"'),
    ),
    "JAX broken": (
        replace(LAPTOP, jax=JaxProbe(None, said="ImportError: no such symbol")),
        ("blocker", "JAX could not start\nImportError: no such symbol", "python -c"),
    ),
    "JAX hangs": (
        replace(LAPTOP, jax=JaxProbe(None, timed_out=True)),
        ("blocker", "JAX did not start in time", "several hosts"),
    ),
    "TPU without libtpu": (
        replace(TPU_VM, versions=LAPTOP.versions, jax=ON_CPU, tpu_lock=None),
        ("blocker", "libtpu is not installed", '"jax[tpu]==0.10.2"'),
    ),
    "TPU fell back": (
        replace(TPU_VM, jax=ON_CPU, tpu_lock=None),
        ("blocker", "TPU v5e, but JAX fell back to the CPU\nFalling back", "--device cpu"),
    ),
    "TPU, CPU wanted": (
        replace(TPU_VM, jax=ON_CPU, jax_platforms="cpu", tpu_lock=None),
        ("note", "JAX_PLATFORMS=cpu keeps JAX on the", "unset JAX_PLATFORMS"),
    ),
    "GPU without plugin": (
        replace(GPU_VM, versions=LAPTOP.versions, jax=ON_CPU),
        ("warning", "jax-cuda13-plugin is not installed", '"jax[cuda13]==0.10.2"'),
    ),
    "GPU without driver": (
        replace(GPU_VM, jax=ON_CPU, gpu_driver=False),
        ("blocker", "GPU, but JAX fell back", "nvidia-smi"),
    ),
    "GPU fell back": (
        replace(GPU_VM, jax=ON_CPU),
        ("blocker", "GPU, but JAX fell back", "--device cpu"),
    ),
    "TPU in use": (
        replace(TPU_VM, holders=(Holder("/dev/accel0", 4711, "python train.py", "bob"),)),
        ("blocker", "/dev/accel0 is held by process 4711 of bob: python train.py", "kill 4711"),
    ),
    "TPU, others hidden": (
        replace(TPU_VM, sees_all_processes=False),
        ("note", "other users are hidden", "sudo"),
    ),
    "lock of another": (
        replace(TPU_VM, tpu_lock=LockFile("/tmp/libtpu_lockfile", "bob", mine=False)),
        ("blocker", "/tmp/libtpu_lockfile belongs to bob", "sudo rm /tmp/libtpu_lockfile"),
    ),
    "lock left over": (
        replace(TPU_VM, jax=JaxProbe(None, said="busy")),
        ("warning", "left over from a process that is gone", "rm /tmp/libtpu_lockfile"),
    ),
    "many hosts": (
        replace(TPU_VM, tpu_hosts=("10.0.0.1", "10.0.0.2")),
        ("warning", "spans 2 hosts", "--worker=all"),
    ),
    "many hosts, hanging": (
        replace(TPU_VM, tpu_hosts=("a", "b"), jax=JaxProbe(None, timed_out=True)),
        ("blocker", "spans 2 hosts", "--worker=all"),
    ),
    "GPU shared": (
        replace(GPU_VM, holders=(Holder("/dev/nvidia0", 99, "python", "bob"),)),
        ("warning", "/dev/nvidia0 is also used by process 99", "--memory-utilization"),
    ),
    "no cache": (
        replace(LAPTOP, compile_cache=Folder("xla", problem="it cannot be written")),
        ("blocker", "no place to keep compiled programs: it cannot", "PAGED_JAX_HOME"),
    ),
    "remote cache": (
        replace(LAPTOP, compile_cache=Folder("gs://bucket/xla", remote=True)),
        ("note", "compiled programs are kept at gs://bucket/xla", ""),
    ),
    "disk full": (
        replace(LAPTOP, model_cache=Folder("/cache/models", free_bytes=GIB // 2)),
        ("warning", "only 0.5 GiB of disk is free for models", "PAGED_JAX_HOME"),
    ),
}


@pytest.mark.parametrize("case", SICK)
def test_what_is_wrong_is_named_with_its_remedy(case):
    sick, (level, what, advice) = SICK[case]
    matching = [f for f in diagnose(sick) if what in f.what and advice in f.advice]
    assert [finding.level for finding in matching] == [level]


def test_a_passed_through_card_is_no_tpu_in_use():
    findings = diagnose(replace(LAPTOP, holders=(Holder("/dev/vfio/7", 1, "qemu", "root"),)))
    assert {finding.level for finding in findings} == {"ok"}


@pytest.mark.parametrize(("sick", "code"), [("no flax", 3), ("little memory", 0)])
def test_the_exit_code_says_whether_something_blocks(sick, code, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "inspect_machine", lambda: SICK[sick][0])
    assert doctor.run_doctor() == code
    out = capsys.readouterr().out
    assert ("must be put right first" in out) == (code == 3)
    assert f"-> {SICK[sick][1][2]}" in out or SICK[sick][1][2] in out


@pytest.mark.parametrize(
    ("version", "specifier", "met"),
    [
        ("0.10.2", "<=0.10.2,>=0.10.1", True),
        ("0.10.3", "<=0.10.2,>=0.10.1", False),
        ("0.9.9", "<=0.10.2,>=0.10.1", False),
        ("0.0.42.1", "==0.0.42.*", True),
        ("0.0.41", "==0.0.42.*", False),
        ("0.10", "==0.10.0", True),
        ("0.10.1", "!=0.10.1", False),
        ("0.10.2", "<0.10.2", False),
        ("0.10.2", ">0.10.1", True),
    ],
)
def test_version_specifiers(version, specifier, met):
    assert satisfies(version, specifier) is met


def test_required_versions_are_read_from_requirement_lines():
    assert required_version(REQUIRES, "jaxlib", "") == "<=0.10.2,>=0.10.1"
    assert required_version(REQUIRES, "jax-cuda13-plugin", "cuda13") == "<=0.10.2,>=0.10.2"
    assert required_version(REQUIRES, "libtpu", "") is None


def test_the_installed_jax_says_what_it_goes_with():
    """Fails when a new JAX writes its requirements in a way that we do not read."""
    requires = machine.jax_requirements()
    for name, extra in [("jaxlib", ""), ("libtpu", "tpu"), ("jax-cuda13-plugin", "cuda13")]:
        assert required_version(requires, name, extra) is not None
    wanted = required_version(requires, "jaxlib", "")
    assert satisfies(machine.installed_versions()["jaxlib"], wanted)


def test_a_process_that_holds_an_accelerator_is_found(tmp_path):
    for pid, target in [("41", "/dev/accel0"), ("42", "/dev/null"), ("43", "/dev/vfio/3")]:
        (tmp_path / "proc" / pid / "fd").mkdir(parents=True)
        (tmp_path / "proc" / pid / "fd" / "5").symlink_to(target)
        (tmp_path / "proc" / pid / "cmdline").write_bytes(b"python\0train.py\0")
    (tmp_path / "proc" / "44").mkdir()  # a process that we may not look into
    found = [(h.device, h.pid, h.command) for h in machine.holders(tmp_path)]
    assert found == [("/dev/accel0", 41, "python train.py"), ("/dev/vfio/3", 43, "python train.py")]


def test_cards_are_counted_on_the_bus(tmp_path):
    cards = {
        "a": ("0x1ae0", "0x0063", "0x120000"),
        "b": ("0x1ae0", "0x0063", "0x120000"),
        "net": ("0x1ae0", "0x0042", "0x020000"),  # Google's network card
        "gpu": ("0x10de", "0x2330", "0x030200"),
        "sound": ("0x10de", "0x22ba", "0x040300"),
    }
    for name, (vendor, device, kind) in cards.items():
        (tmp_path / name).mkdir()
        for file, value in [("vendor", vendor), ("device", device), ("class", kind)]:
            (tmp_path / name / file).write_text(value + "\n")
    assert list(machine.tpu_chips(tmp_path)) == ["v5e", "v5e"]
    assert [path.name for path in machine.nvidia_gpus(tmp_path)] == ["gpu"]


def test_memory_is_read_in_bytes(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       2048 kB\nMemAvailable:   1024 kB\n")
    assert machine.read_meminfo(tmp_path / "meminfo") == {
        "MemTotal": 2 * 2**20,
        "MemAvailable": 2**20,
    }
    assert machine.read_meminfo(tmp_path / "missing") == {}


def test_the_lock_file_has_an_owner(tmp_path):
    assert machine.tpu_lock(tmp_path / "libtpu_lockfile") is None
    (tmp_path / "libtpu_lockfile").touch()
    lock = machine.tpu_lock(tmp_path / "libtpu_lockfile")
    assert lock is not None
    assert lock.mine
    assert lock.owner == machine.user_name(os.geteuid())


class MetadataServer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if right and "worker-network-endpoints" in self.path else 404)
        self.end_headers()
        self.wfile.write(b"worker-0:unused:10.0.0.1,worker-1:unused:10.0.0.2")

    def log_message(self, *args):
        pass


def test_the_hosts_of_a_slice_are_asked_for():
    with http.server.HTTPServer(("127.0.0.1", 0), MetadataServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
        assert machine.tpu_hosts(environment, ask_metadata=True) == ("10.0.0.1", "10.0.0.2")
        server.shutdown()
    assert machine.tpu_hosts(environment, ask_metadata=True) == ()  # nobody answers any more
    assert machine.tpu_hosts(environment, ask_metadata=False) == ()
    named = machine.tpu_hosts({"TPU_WORKER_HOSTNAMES": "a, b"}, ask_metadata=False)
    assert named == ("a", "b")


def test_jax_is_started_in_a_process_of_its_own():
    probe = machine.probe_jax()
    assert probe.attention == "xla: auto, no kernel is written for 'cpu'"
    assert probe.backend == "cpu"
    assert probe.devices[0].kind == "cpu"


def test_a_jax_that_fails_or_hangs_is_reported():
    failed = machine.probe_jax("raise RuntimeError('TPU is busy')")
    assert failed.backend is None
    assert failed.said.endswith("RuntimeError: TPU is busy")
    hung = machine.probe_jax("import time; time.sleep(60)", timeout_s=0.3)
    assert hung.timed_out
    assert hung.backend is None


def test_a_cache_folder_is_made_private_and_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_JAX_HOME", str(tmp_path / "home"))
    assert machine.cache_folder("xla").problem == ""
    assert (tmp_path / "home" / "xla").stat().st_mode & 0o777 == 0o700
    (tmp_path / "home" / "xla" / "program").write_bytes(b"12345")
    folder = machine.cache_folder("xla")
    assert (folder.num_files, folder.size_bytes) == (1, 5)
    assert folder.free_bytes > 0


def test_jaxs_own_setting_places_the_compile_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_JAX_HOME", str(tmp_path / "home"))
    assert machine.compile_cache_folder({}).path == str(tmp_path / "home" / "xla")
    ours = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "ours")}
    assert machine.compile_cache_folder(ours).path == str(tmp_path / "ours")
    remote = machine.compile_cache_folder({"JAX_COMPILATION_CACHE_DIR": "gs://bucket/xla"})
    assert remote.remote
    assert not remote.problem


def test_a_cache_folder_that_cannot_be_used_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_JAX_HOME", str(tmp_path))
    (tmp_path / "models").write_text("a file where the folder should be")
    assert "cannot be written" in machine.cache_folder("models").problem
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGED_JAX_HOME", str(tmp_path / "file" / "home"))
    assert "PAGED_JAX_HOME" in machine.cache_folder("models").problem


def test_this_machine_can_be_inspected(tmp_path):
    """Everything at once, over an empty root: no accelerator, and nothing raises."""
    seen = machine.inspect_machine(tmp_path)
    assert (seen.num_tpu_chips, seen.num_gpus, seen.holders) == (0, 0, ())
    assert seen.versions["jax"]
