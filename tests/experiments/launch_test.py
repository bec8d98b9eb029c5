"""Tests of the launchers' commands, word for word, and of their scripts, with stand-ins for the tools they call."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.launch import __main__ as launch
from experiments.launch import accelerators, preflight, scripts, steps
from speccascade_jax.runtime import hosts, interrupts
from speccascade_jax.runtime.paths import repository_root

SWEEP = ["--", "python", "-m", "experiments.sweep", "--gin_file=a b.gin"]
SURVEY = ["--", "python", "-m", "experiments.survey", "--gin_file=a.gin"]
SPOT = ("tpu_queued", "--name", "pod", "--zone", "us-west4-a", "--accelerator_type", "v5litepod-16",
        "--place", "gs://b/launches")  # fmt: skip
UV = """\
export PATH="$HOME/.local/bin:$PATH" &&
  { command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh; } &&
  { test -x .venv/bin/python || uv venv --python 3.11; } &&
  uv pip install --constraint constraints.txt '.[tpu]'"""
LOOP = """\
export PATH="$PWD/.venv/bin:$PATH" SPECCASCADE_COMPILATION_CACHE="$PWD/.xla"
status=0 restarts=0 stopping= child=
trap 'stopping=1; test -z "$child" || kill -TERM "$child"' TERM
while test -z "$stopping"; do
  "${command[@]}" &
  child=$!
  test -z "$stopping" || kill -TERM "$child"  # the signal came before the line above
  wait "$child"; status=$?
  # a signal ends `wait` early, while the command still saves its state
  while kill -0 "$child" 2> /dev/null; do wait "$child"; status=$?; done
  child=
  echo "$(date -u +%FT%TZ) exit status $status after $restarts restarts"
  case $status in
    75|143) test "$restarts" -lt "$max_restarts" || break ;;
    *) break ;;
  esac
  restarts=$((restarts + 1))
  sleep 10 &
  wait "$!"
done
"""
GOLDEN = {
    ("local", "--shards", "2", "--device_variable", "CUDA_VISIBLE_DEVICES"): """\
CUDA_VISIBLE_DEVICES=0 python -m experiments.sweep '--gin_file=a b.gin' --shard_id=0 --num_shards=2 &
CUDA_VISIBLE_DEVICES=1 python -m experiments.sweep '--gin_file=a b.gin' --shard_id=1 --num_shards=2 &
wait
""",
    ("local", "--processes", "2"): """\
python -m experiments.sweep '--gin_file=a b.gin' \
--coordinator_address=localhost:8476 --process_count=2 --process_index=0 &
python -m experiments.sweep '--gin_file=a b.gin' \
--coordinator_address=localhost:8476 --process_count=2 --process_index=1 &
wait
""",
    ("tpu_vm", "--name", "pod", "--zone", "us-west4-a", "--project", "p", "--accelerator_type", "v5p-8"): f"""\
python -m experiments.preflight '--gin_file=a b.gin' --topology=v5p:2x2x1 &&
mkdir -p launches/pod && cat > launches/pod/speccascade.sh <<'END' &&
#!/bin/bash
max_restarts=100
command=(python -m experiments.sweep '--gin_file=a b.gin')
cd && mkdir -p speccascade_jax/logs && cd speccascade_jax || exit 1
exec > >(tee -a "logs/$(hostname).log") 2>&1
exec 9> .lock
flock --nonblock 9 || {{ echo "error: another run goes on in speccascade_jax: wait for its end"; exit 1; }}
echo $$ > .pid
tar xzf ~/speccascade.tar.gz &&
  {UV} || exit 1
{LOOP}exit "$status"
END
git archive --format=tar.gz --output=launches/pod/speccascade.tar.gz HEAD &&
gcloud compute tpus tpu-vm scp launches/pod/speccascade.sh launches/pod/speccascade.tar.gz pod: \
--zone=us-west4-a --project=p --worker=all &&
gcloud compute tpus tpu-vm ssh pod --zone=us-west4-a --project=p --worker=all \
'--command=nohup bash speccascade.sh > /dev/null 2>&1 < /dev/null &'
""",
    ("tpu_vm", "--name", "pod", "--zone", "us-west4-a", "--folder", "~/s", "--as_is", "--attach"): f"""\
mkdir -p launches/pod && cat > launches/pod/speccascade.sh <<'END' &&
#!/bin/bash
max_restarts=100
command=(python -m experiments.sweep '--gin_file=a b.gin')
cd && mkdir -p ~/s/logs && cd ~/s || exit 1
exec > >(tee -a "logs/$(hostname).log") 2>&1
exec 9> .lock
flock --nonblock 9 || {{ echo "error: another run goes on in ~/s: wait for its end"; exit 1; }}
echo $$ > .pid
{LOOP}exit "$status"
END
gcloud compute tpus tpu-vm scp launches/pod/speccascade.sh pod: --zone=us-west4-a --worker=all &&
gcloud compute tpus tpu-vm ssh pod --zone=us-west4-a --worker=all '--command=bash speccascade.sh'
""",
    (*SPOT, "--create=--network=n", "--max_restarts", "9"): f"""\
python -m experiments.preflight '--gin_file=a b.gin' --topology=v5e:4x4 &&
mkdir -p launches/pod && cat > launches/pod/startup.sh <<'END' &&
#!/bin/bash
mkdir -p /opt/speccascade
cat > /opt/speccascade/speccascade.sh <<'RUN'
name=pod
place=gs://b/launches/pod
max_restarts=9
command=(python -m experiments.sweep '--gin_file=a b.gin' --multiprocess)
location=(--zone=us-west4-a)
export HOME=/root PATH="$PATH:/snap/bin"
cd "$(dirname "$0")" || exit 1
host=$(curl -sf -H Metadata-Flavor:Google \
http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number)
log="$PWD/host-$host.$(date -u +%Y%m%dT%H%M%SZ).log"
exec > "$log" 2>&1
copy_log() {{ gcloud storage cp "$log" "$place/logs/" > /dev/null 2>&1; }}
while sleep 60; do copy_log; done &
copier=$!
prepare() (
  gcloud storage cp "$place/speccascade.tar.gz" . && mkdir -p code && tar xzf speccascade.tar.gz -C code && cd code &&
  {UV}
)
if {{ prepare || {{ sleep 60; prepare; }}; }} && cd code; then
{LOOP}else
  status=1
fi
kill "$copier"
copy_log
# a preempted machine reports nothing, so another one is created, which continues
test -z "$stopping" || exit "$status"
echo "$status" | gcloud storage cp - "$place/status/host-$host"
# If the loop that watches has ended, nothing else deletes the idle, paid slice.
# Without the right to delete, this has no effect.
if test "$host" = 0; then
  sleep 120
  gcloud compute tpus queued-resources delete "$name" "${{location[@]}}" --force --quiet --async
fi
RUN
systemd-run --unit=speccascade --property=KillMode=mixed --property=TimeoutStopSec=30 \\
  --property=After=network-online.target bash /opt/speccascade/speccascade.sh
END
git archive --format=tar.gz --output=launches/pod/speccascade.tar.gz HEAD &&
gcloud storage cp launches/pod/speccascade.tar.gz gs://b/launches/pod/speccascade.tar.gz &&
bash <<'END'
name=pod
place=gs://b/launches/pod
location=(--zone=us-west4-a)
create=(gcloud compute tpus queued-resources create pod --node-id=pod --zone=us-west4-a \
--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot \
--metadata-from-file=startup-script=launches/pod/startup.sh --network=n)
resource() {{ gcloud compute tpus queued-resources "$1" "$name" "${{location[@]}}" "${{@:2}}"; }}
state() {{
  local said
  if said=$(resource describe '--format=value(state.state)' 2>&1); then
    echo "${{said##*$'\\n'}}"
  elif [[ $said == *NOT_FOUND* ]]; then
    echo ABSENT
  else
    echo UNKNOWN
  fi
}}
remove() {{ resource delete --force --quiet; }}
now=$(state) before=
# what an earlier launch of this name has left
test "$now" != ABSENT || gcloud storage rm "$place/status/*" > /dev/null 2>&1
while true; do
  if statuses=$(gcloud storage cat "$place/status/*" 2> /dev/null) && test -n "$statuses"; then
    sleep 60  # until the other hosts have copied their logs
    statuses=$(gcloud storage cat "$place/status/*")
    status=$(sort -n <<< "$statuses" | tail -n 1)
    remove
    echo "$name ended with exit status $status; logs: $place/logs/"
    exit "$status"
  fi
  test "$now" = "$before" || echo "$(date -u +%FT%TZ) $name: $now"
  before=$now
  case $now in
    ABSENT) "${{create[@]}}" || exit 1 ;;
    SUSPENDED) remove ;;
    FAILED) resource describe; remove; exit 1 ;;
  esac
  sleep 60
  now=$(state)
done
END
""",
    ("slurm", "--shards", "8", "--sbatch=--gres=gpu:1"): """\
sbatch <<'END'
#!/bin/bash
#SBATCH --job-name=speccascade
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%A_%a.log
#SBATCH --array=0-7
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
cd . || exit 1
srun python -m experiments.sweep '--gin_file=a b.gin' --shard_id=$SLURM_ARRAY_TASK_ID --num_shards=8
status=$?
case $status in
  75|143)
    test "${SLURM_RESTART_COUNT:-0}" -ge 100 || scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" ;;
esac
exit "$status"
END
""",
    ("slurm", "--processes", "4", "--time", "1:00:00", "--folder", "~/s", "--max_restarts", "3"): """\
sbatch <<'END'
#!/bin/bash
#SBATCH --job-name=speccascade
#SBATCH --time=1:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
cd ~/s || exit 1
# srun's status is the largest one of its tasks: a killed task must not hide the 75 of all others, nor a 75 an error
task='
  trap : TERM
  "$@"; status=$?
  case $status in
    0|75|143) ;;
    137) status=75 ;;
    *) test "$status" -ge 128 || status=$((status + 128)) ;;
  esac
  exit "$status"'
srun --kill-on-bad-exit=0 --output=%x-%j.host-%n.log --open-mode=append \
bash -c "$task" task python -m experiments.sweep '--gin_file=a b.gin' --multiprocess
status=$?
case $status in
  75|143)
    test "${SLURM_RESTART_COUNT:-0}" -ge 3 || scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$status"
END
""",
    ("gke", "--cluster", "c", "--tpu_type", "v5litepod-16", "--image", "i", "--xpk=--spot"): """\
python -m experiments.preflight '--gin_file=a b.gin' --topology=v5e:4x4 &&
xpk workload create --workload=speccascade --cluster=c --tpu-type=v5litepod-16 --docker-image=i \
--max-restarts=100 --restart-on-exit-codes=75,143 --spot \
'--command=cd /speccascade_jax && exec python -m experiments.sweep '"'"'--gin_file=a b.gin'"'"' --multiprocess'
""",
    ("skypilot", "--accelerators", "tpu-v6e-8", "--infra", "gcp/us-west4", "--no_preflight"): f"""\
mkdir -p launches/speccascade && cat > launches/speccascade/task.yaml <<'END' &&
name: speccascade
workdir: .
num_nodes: 1
resources:
  infra: "gcp/us-west4"
  accelerators: "tpu-v6e-8"
  accelerator_args:
    runtime_version: v2-alpha-tpuv6e
  use_spot: true
  job_recovery:
    max_restarts_on_errors: 0
    recover_on_exit_codes: [75, 143]
setup: |
  {UV.replace(chr(10), chr(10) + "  ")}
run: |
  export PATH="$PWD/.venv/bin:$PATH" SPECCASCADE_COMPILATION_CACHE="$PWD/.xla"
  python -m experiments.sweep '--gin_file=a b.gin'
END
sky jobs launch --yes --name=speccascade launches/speccascade/task.yaml
""",
    ("skypilot", "--accelerators", "H100:8", "--processes", "2", "--on_demand"): f"""\
mkdir -p launches/speccascade && cat > launches/speccascade/task.yaml <<'END' &&
name: speccascade
workdir: .
num_nodes: 2
resources:
  accelerators: "H100:8"
  use_spot: false
  job_recovery:
    max_restarts_on_errors: 0
    recover_on_exit_codes: [75, 143]
setup: |
  {UV.replace(chr(10), chr(10) + "  ").replace("tpu", "cuda12")}
run: |
  export PATH="$PWD/.venv/bin:$PATH" SPECCASCADE_COMPILATION_CACHE="$PWD/.xla"
  python -m experiments.sweep '--gin_file=a b.gin' \
--coordinator_address="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):8476" --process_count=$SKYPILOT_NUM_NODES \
--process_index=$SKYPILOT_NODE_RANK
END
sky jobs launch --yes --name=speccascade launches/speccascade/task.yaml
""",
}


@pytest.mark.parametrize("given", GOLDEN, ids=" ".join)
def test_a_dry_run_prints_the_commands(given, capsys):
    assert launch.main([*given, "--dry_run", *SWEEP]) == 0
    assert capsys.readouterr().out == GOLDEN[given]


@pytest.mark.parametrize(("given", "message"), [
    (["local"], "error: no command: put it after --"),
    (["local", "--shards", "0", *SWEEP], "error: shards"),
    (["local", "--processes", "2", "--", "python", "-m", "experiments.finetune", "--mode=export", "--output=o"],
     "error: experiments.finetune --mode=export runs in one process: choose a type with one host"),
    ([*SPOT, *SURVEY], "error: experiments.survey runs in one process: choose a type with one host"),
    (["gke", "--cluster", "c", "--tpu_type", "v6e-8", "--image", "i", *SURVEY], "error: experiments.survey runs in"),
    (["slurm", "--max_restarts", "-1", *SWEEP], "error: max_restarts"),
    (["slurm", *SWEEP, "--gin.A='b\nc'"], "error: the command's word \"--gin.A='b\\nc'\" has a line break"),
    (["slurm", "--shards", "2", "--processes", "2", *SWEEP], "error: shards=2 and processes=2 exclude each other"),
    (["tpu_vm", "--name", "a", "--zone", "us-west4-a", *SWEEP], "error: not installed here: git, gcloud; --dry_run"),
    (["tpu_vm", "--name", "a", "--zone", "b", *SWEEP], "error: zone='b': give a zone, such as"),
    ([*SPOT, *SWEEP], "error: the preflight needs the TPUs' compiler, which is not installed"),
    ([*SPOT, "--name", "A_pod", *SWEEP], "error: name='A_pod': give at most 40 lower-case letters"),
    ([*SPOT, "--place", "launches", *SWEEP], "error: place='launches': give an address in a bucket"),
    ([*SPOT, "--capacity", "cheap", *SWEEP], "error: capacity='cheap': give one of spot, reserved, on_demand"),
    ([*SPOT, "--accelerator_type", "v5e-16", *SWEEP], "error: accelerator type 'v5e-16' is not known: give one of v4-"),
    ([*SPOT, "--accelerator_type", "tpu7x-8", *SWEEP], "error: accelerator type 'tpu7x-8' is offered on GKE only"),
    ([*SPOT, "--accelerator_type", "v5litepod-12", *SWEEP], "error: accelerator type 'v5litepod-12': no slice has 12"),
    (["gke", "--cluster", "c", "--tpu_type", "v4-7", "--image", "i", *SWEEP], "error: accelerator type 'v4-7': N "),
    (["skypilot", "--accelerators", "tpu-v5e-8", *SWEEP], "error: accelerator type 'v5e-8' is not known"),
    (["skypilot", "--accelerators", "a b", *SWEEP], "error: accelerators='a b': give a name, such as"),
    (["skypilot", "--accelerators", "H100", "--infra", "a: b", *SWEEP], "error: infra='a: b': give CLOUD"),
])  # fmt: skip
def test_a_failed_start_gives_one_line_of_error_and_creates_nothing(given, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert launch.main(given) == 1
    said = capsys.readouterr().err
    assert said.startswith(message) and len(said.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_local_parts_are_run_and_a_failed_part_is_named(tmp_path, capfd):
    """Checks that each part gets its number, and that a part that fails does not stop the others."""
    script = tmp_path / "part.py"
    # one write per line: parts share the output, and `print` may write a line and its end separately
    prints_arguments = r"os.write(1, f'{sys.argv[1:]}\n'.encode())"
    script.write_text(f"import os, sys; {prints_arguments}; sys.exit(3 if '--shard_id=1' in sys.argv else 0)")
    assert launch.main(["local", "--shards", "3", "--", sys.executable, str(script)]) == 3
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"['--shard_id={n}', '--num_shards=3']" for n in range(3)]
    assert err.startswith("error: exit status 3 of ") and "--shard_id=1" in err and len(err.splitlines()) == 1


READY = "/bin/sleep 0.1"  # until the launcher waits
SAVES = "/bin/sleep 0.3; touch saved; exit 0"


@pytest.fixture
def listening():
    """Handles SIGINT as a terminal's process does: a test run in the background inherits that it is ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize(("lines", "status"), [
    # Ctrl-C reaches the command as well, and this one's second signal ends it, as during training
    (f"{READY}; kill -INT $PPID; {SAVES}", 130),
    (f"trap '{SAVES}' TERM; {READY}; kill -TERM $PPID; while true; do /bin/sleep 0.02; done", 143),
])  # fmt: skip
def test_a_launch_that_is_stopped_waits_for_the_state_of_its_commands(lines, status, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended, interrupts.told(interrupts.SAME):
        steps.run([steps.Command(("bash", "-c", lines))], together=True)
    assert ended.value.code == status and Path("saved").exists()


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("signals", ["kill -TERM $PPID", "kill -INT $PPID; /bin/sleep 0.3; kill -INT $PPID"])
def test_a_command_that_goes_on_after_signals_is_killed(signals, monkeypatch):
    if signals.count("kill") == 1:  # a second signal does not wait
        monkeypatch.setattr(steps, "GRACE", 0.2)
    goes_on = steps.Command(("bash", "-c", f"trap '' TERM INT; {READY}; {signals}; exec /bin/sleep 9"))
    begun = time.monotonic()
    with pytest.raises(SystemExit), interrupts.told(interrupts.SAME):
        steps.run([goes_on], together=True)
    assert time.monotonic() - begun < 5


def test_the_statuses_that_restart_are_those_of_the_package():
    assert scripts.RESTARTED == (hosts.STATUS, 128 + signal.SIGTERM) and 1 not in scripts.RESTARTED


@pytest.mark.parametrize(("name", "topology"), [
    ("v5litepod-1", "v5e"), ("v5litepod-8", "v5e:2x4"), ("v5litepod-32", "v5e:4x8"), ("v6e-256", "v6e:16x16"),
    ("v4-8", "v4:2x2x1"), ("v4-64", "v4:2x4x4"), ("v4-3072", "v4:8x12x16"), ("v5p-384", "v5p:4x4x12"),
    ("v5p-1152", "v5p:4x12x12"), ("tpu7x-128", "tpu7x:4x4x4"),
])  # fmt: skip
def test_topologies_are_the_defaults_of_the_types(name, topology):
    assert accelerators.topology_of(name) == topology


def test_a_preflight_takes_over_the_settings_of_the_command():
    words = [
        "env",
        "A=",
        ".venv/bin/python",
        "-m",
        "experiments.finetune",
        "--gin_file",
        "a.gin",
        "--gin.X=1",
        "--debug",
    ]
    step = preflight.step_for(words, "v5e:2x2")
    assert str(step) == ("python -m experiments.preflight --gin_file a.gin --gin.X=1 --part=train --topology=v5e:2x2")
    assert preflight.step_for(["python", "-m", "experiments.tables", "--gin_file=a.gin"], "v5e") is None


def test_notes_name_unchecked_settings_and_files_that_will_be_lost(capsys):
    assert launch.main([*SPOT, "--accelerator_type", "v5litepod-8", "--dry_run", *SURVEY]) == 0
    said = capsys.readouterr()
    assert "preflight" not in said.out
    assert [line.split(":")[0] for line in said.err.splitlines()] == ["note", "note"]
    assert "only sweep and finetune" in said.err and "no gs:// address" in said.err
    assert launch.main([*SPOT, "--dry_run", *SWEEP, "--gin.sweep.output='gs://b/mine.jsonl'"]) == 0
    assert capsys.readouterr().err == ""


def test_a_step_that_fails_ends_a_launch(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    fails, writes = steps.Command(("bash", "-c", "exit 3")), steps.File("launches/a/b.txt", "text\n")
    assert steps.run([writes, fails, steps.File("never", "")], together=False) == 3
    assert Path("launches/a/b.txt").read_text() == "text\n" and not Path("never").exists()
    assert capfd.readouterr().err == "error: exit status 3 of bash -c 'exit 3'\n"


# --- the scripts, in bash, with stand-ins for the programs that they call


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Returns a function that puts a stand-in for a program on the path, which writes its calls to `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def add(name, lines=""):
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n{lines}\n')
        (folder / name).chmod(0o755)

    add("sleep", "exec /bin/sleep 0.05")
    return add


def bash(script, **options):
    return subprocess.run(["bash"], input=script, text=True, capture_output=True, timeout=60, **options)


def calls(name):
    return [line for line in Path("calls").read_text().splitlines() if line.startswith(name)]


def test_nothing_is_created_if_the_programs_do_not_fit(tools, tmp_path, monkeypatch, capfd):
    tools("preflight", "exit 3")
    tools("gcloud")
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "bin/preflight"))
    assert launch.main([*SPOT, *SWEEP, "--gin.sweep.output='gs://b/mine.jsonl'"]) == 3
    assert len(calls("preflight")) == 1 and not calls("gcloud") and not Path("launches").exists()
    assert capfd.readouterr().err.startswith("error: exit status 3 of ")


STATUSES = 'n=$(cat runs 2> /dev/null || echo 0); echo $((n + 1)) > runs; statuses=({}); exit "${{statuses[n]}}"'


@pytest.mark.parametrize(("statuses", "runs", "last"), [
    ("75 143 0", 3, 0), ("1 0", 1, 1), ("143 2 0", 2, 2), ("137 0", 1, 137), ("75 75 75 75 0", 4, 75),
])  # fmt: skip
def test_a_host_repeats_a_command_only_after_statuses_75_and_143(tools, statuses, runs, last):
    tools("work", STATUSES.format(statuses))
    script = scripts.variables({"max_restarts": 3}, ["work"]) + scripts.RESTARTING + 'exit "$status"'
    assert bash(script).returncode == last and len(calls("work")) == runs


def test_a_host_passes_sigterm_on_and_waits_for_the_state(tools):
    saves = "trap '/bin/sleep 0.3; echo saved; exit 143' TERM"
    tools("work", f"{saves}; echo ready; for _ in {{1..100}}; do /bin/sleep 0.05; done")
    script = scripts.variables({"max_restarts": 3}, ["work"]) + scripts.RESTARTING + 'exit "$status"'
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "saved\n"
        assert process.wait(timeout=30) == 143
    assert len(calls("work")) == 1


def test_sigterm_reaches_a_command_that_has_just_started(tools):
    tools("work", "for _ in {1..40}; do /bin/sleep 0.05; done")
    early = scripts.RESTARTING.replace("  child=$!\n", "  kill -TERM $$\n  child=$!\n")
    assert early != scripts.RESTARTING
    assert bash(scripts.variables({"max_restarts": 3}, ["work"]) + early + 'exit "$status"').returncode == 143


GCLOUD = """
case "$*" in
  *describe*) test -e state || { echo "ERROR: NOT_FOUND: no such resource" >&2; exit 1; }; cat state ;;
  *create*)
    if test -e preempted; then touch ended; echo ACTIVE > state; else touch preempted; echo SUSPENDED > state; fi ;;
  *delete*) rm state ;;
  *"storage cat"*) test -e ended && printf '0\\n4\\n' || exit 1 ;;
esac
"""


def test_a_suspended_resource_is_created_again_until_a_host_reports_the_end(tools):
    tools("gcloud", GCLOUD)
    loop = scripts.watching("pod", ["--zone=z"], "gs://b/pod", ["gcloud", "create", "pod"])
    done = bash(loop)
    assert done.returncode == 4 and "pod ended with exit status 4; logs: gs://b/pod/logs/" in done.stdout
    kinds = [word for line in calls("gcloud") for word in ("create", "delete", "storage rm") if word in line]
    assert kinds == ["storage rm", "create", "delete", "create", "delete"] and not Path("state").exists()


@pytest.mark.parametrize(("lines", "status"), [
    ("case $* in *describe*) echo FAILED ;; *cat*) exit 1 ;; esac", 1),
    ("case $* in *describe*) echo NOT_FOUND; exit 1 ;; *create*) exit 7 ;; *cat*) exit 1 ;; esac", 1),
])  # fmt: skip
def test_a_queued_resource_that_fails_ends_the_loop(tools, lines, status):
    tools("gcloud", lines)
    assert bash(scripts.watching("pod", [], "gs://b/pod", ["gcloud", "create"])).returncode == status
    assert len(calls("gcloud create")) <= 1


BUCKET = """
case "$*" in
  *"cp - "*) cat > FOLDER/status ;;
  *FOLDER/host-0*) cp FOLDER/host-0.*.log FOLDER/copied ;;
  *speccascade.tar.gz*) test -e code.tar.gz && cp code.tar.gz speccascade.tar.gz ;;
esac
"""


@pytest.fixture
def host(tools, tmp_path):
    """Writes `host.sh`, the script of a queued resource's host for the command `work`, and stand-ins for its tools.

    `code.tar.gz` stands for the code in the bucket, `status` and `copied` for the objects that the host writes.
    """
    tools("gcloud", BUCKET.replace("FOLDER", str(tmp_path)))
    tools("curl", "echo 0")
    tools("uv", "mkdir -p .venv/bin")
    subprocess.run(["tar", "czf", "code.tar.gz", "bin"], check=True)
    startup = scripts.on_queued_resource(["work"], "pod", ["--zone=z"], "gs://b/pod", 5)
    script = startup.partition("<<'RUN'\n")[2].partition("RUN\n")[0]
    Path("host.sh").write_text(script.replace("HOME=/root", f"HOME={tmp_path}"))


@pytest.mark.parametrize(
    ("statuses", "has_code", "reported"), [("75 0", True, "0"), ("1", True, "1"), ("", False, "1")]
)
def test_a_host_of_a_queued_resource_reports_its_end_and_log(host, tools, statuses, has_code, reported):
    tools("work", "echo from the work; " + STATUSES.format(statuses))
    if not has_code:
        Path("code.tar.gz").unlink()
    subprocess.run(["bash", "host.sh"], check=True, timeout=60)
    assert Path("status").read_text() == f"{reported}\n"
    assert Path("copied").read_text().count("from the work\n") == len(statuses.split())
    assert calls("gcloud compute") == [
        "gcloud compute tpus queued-resources delete pod --zone=z --force --quiet --async"
    ]


def test_a_preempted_host_reports_no_end(host, tools, tmp_path):
    tools("work", f"trap 'exit 143' TERM; touch {tmp_path}/ready; for _ in {{1..100}}; do /bin/sleep 0.05; done")
    with subprocess.Popen(["bash", "host.sh"]) as process:
        while not Path("ready").exists():
            time.sleep(0.02)
        process.terminate()
        assert process.wait(timeout=30) == 143
    assert not Path("status").exists() and Path("copied").exists() and not calls("gcloud compute")


def test_a_tpu_vm_unpacks_the_code_logs_its_output_and_runs_once_at_a_time(tools, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tools("uv", "mkdir -p .venv/bin")
    tools("work", 'test -e bin/work && test "$(cat .pid)" = "$PPID" && echo from the work; exit 5')
    subprocess.run(["tar", "czf", scripts.CODE, "bin"], check=True)
    script = scripts.on_tpu_vm(["work"], "code", 3, as_is=False)
    assert bash(script).returncode == 5
    with Path("code/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = bash(script)
    assert refused.returncode == 1 and "error: another run goes on in code" in refused.stdout
    (log,) = Path("code/logs").iterdir()
    assert log.read_text().count("from the work\n") == 1 and len(calls("work")) == 1


@pytest.mark.parametrize(("status", "count", "requeued"), [(75, 0, 1), (143, 2, 1), (1, 0, 0), (0, 0, 0), (75, 3, 0)])
def test_slurm_requeues_a_job_only_after_statuses_75_and_143(tools, monkeypatch, status, count, requeued):
    tools("srun", f"exit {status}")
    tools("scontrol")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    args = launch._parser().parse_args(["slurm", "--max_restarts", "3"])
    (step,) = launch.LAUNCHERS["slurm"].steps(args, ["work"])
    assert bash(step.stdin).returncode == status
    assert calls("scontrol") == ["scontrol requeue 42"] * requeued


SRUN = """
while [[ $1 == --* ]]; do shift; done
largest=0
for number in 0 1 2; do
  NUMBER=$number "$@"; status=$?
  (( status > largest )) && largest=$status
done
exit $largest
"""
"""A stand-in for srun, which runs three tasks and returns their largest status."""


@pytest.mark.parametrize(("statuses", "requeued", "last"), [
    ("75 137 75", 1, 75), ("75 75 0", 1, 75), ("143 143 75", 1, 143), ("1 75 75", 0, 129), ("0 2 0", 0, 130),
    ("139 75 75", 0, 139), ("0 0 0", 0, 0),
])  # fmt: skip
def test_a_task_hides_neither_anothers_restart_nor_its_error_under_slurm(tools, monkeypatch, statuses, requeued, last):
    tools("srun", SRUN)
    tools("scontrol")
    tools("work", f'statuses=({statuses}); test "$*" = "a b --multiprocess" || exit 3; exit "${{statuses[NUMBER]}}"')
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    args = launch._parser().parse_args(["slurm", "--processes", "3"])
    (step,) = launch.LAUNCHERS["slurm"].steps(args, ["work", "a b"])
    assert bash(step.stdin).returncode == last and len(calls("scontrol")) == requeued


def test_a_task_under_slurm_waits_for_the_state(tools, monkeypatch):
    """SLURM signals all processes of a task: the shell around the command must not end before it."""
    tools(
        "work",
        "trap '/bin/sleep 0.3; echo saved; exit 143' TERM; echo ready; for _ in {1..100}; do /bin/sleep 0.05; done",
    )
    args = launch._parser().parse_args(["slurm", "--processes", "2"])
    (step,) = launch.LAUNCHERS["slurm"].steps(args, ["work"])
    script = step.stdin.partition("srun")[2].partition("task='")[2].partition("'\n")[0]
    words = ["bash", "-c", script, "task", "work"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "saved\n"
        assert process.wait(timeout=30) == 143


@pytest.mark.parametrize(("name", "several"), [
    ("v4-8", False), ("v4-16", True), ("v5litepod-8", False), ("v5litepod-16", True), ("v5p-8", False),
    ("v6e-8", False), ("v6e-16", True), ("tpu7x-8", False), ("tpu7x-16", True),
])  # fmt: skip
def test_commands_join_the_other_hosts_of_slices_that_have_several(name, several, capsys):
    assert accelerators.joined(["work"], name) == ["work", "--multiprocess"][: 1 + several]
    assert accelerators.joined(["work", "--multiprocess", "a"], name) == ["work", "--multiprocess", "a"]
    vm = ["tpu_vm", "--name", "a", "--zone", "us-west4-a", "--dry_run"]
    assert launch.main([*vm, *SWEEP]) == 0
    assert capsys.readouterr().err.startswith("note: without --accelerator_type, the number of hosts is unknown")
    assert launch.main([*vm, *SWEEP, "--multiprocess"]) == 0 and not capsys.readouterr().err
    assert launch.main(["skypilot", "--accelerators", f"tpu-{name}", "--dry_run", "--no_preflight", *SWEEP]) in (0, 1)
    assert ("--multiprocess" in capsys.readouterr().out) is (several and name[:5] != "tpu7x")


@pytest.mark.parametrize(
    ("name", "several"), [("v5litepod-8", True), ("v6e-8", True), ("v6e-4", False), ("v4-8", False)]
)
def test_hosts_on_gke_have_at_most_four_chips(name, several, capsys):
    gke = ["gke", "--cluster", "c", "--tpu_type", name, "--image", "i", "--no_preflight", "--dry_run"]
    assert launch.main([*gke, *SWEEP]) == 0
    assert ("--multiprocess" in capsys.readouterr().out) is several


def test_commands_that_join_other_processes_are_those_that_the_launchers_know():
    joins = re.compile(r"gin_flags\.join|together=True|\"together\": True")
    files = [file for file in (repository_root() / "experiments").glob("*.py") if joins.search(file.read_text())]
    assert {f"experiments.{file.stem}" for file in files} == {*accelerators.TOGETHER}


def test_the_docker_image_runs_the_experiments_of_its_folder():
    lines = (repository_root() / "Dockerfile").read_text().splitlines()
    folder = next(o.default for o in launch.LAUNCHERS["gke"].options if o.name == "folder")
    assert [line for line in lines if not line.startswith("#")] == [
        "FROM python:3.11-slim", "ARG EXTRA=tpu", f"WORKDIR {folder}", "COPY . .",
        'RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRA}]"',
        'CMD ["python", "-m", "experiments.sweep", "--help"]',
    ]  # fmt: skip
    ignored = (repository_root() / ".dockerignore").read_text().splitlines()
    assert {".git", "results", "launches", ".venv*"} <= set(ignored)
