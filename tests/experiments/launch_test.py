"""Commands of the launchers, word for word; local processes share the work."""

from __future__ import annotations

import sys

import pytest

from experiments.launch import __main__ as launch

SWEEP = ["--", "python", "-m", "experiments.sweep", "--gin_file=a b.gin"]
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
    ("tpu_vm", "--name", "pod", "--zone", "us-west4-a", "--project", "p"): """\
gcloud compute tpus tpu-vm ssh pod --zone=us-west4-a --project=p --worker=all \
'--command=cd speccascade_jax && python -m experiments.sweep '"'"'--gin_file=a b.gin'"'"''
""",
    ("slurm", "--shards", "8", "--sbatch=--gres=gpu:1"): """\
sbatch <<'END'
#!/bin/bash
#SBATCH --job-name=speccascade
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --gres=gpu:1
#SBATCH --array=0-7
#SBATCH --ntasks=1
cd . || exit 1
python -m experiments.sweep '--gin_file=a b.gin' --shard_id=$SLURM_ARRAY_TASK_ID --num_shards=8
END
""",
    ("slurm", "--processes", "4", "--time", "1:00:00", "--folder", "~/s"): """\
sbatch <<'END'
#!/bin/bash
#SBATCH --job-name=speccascade
#SBATCH --time=1:00:00
#SBATCH --requeue
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
cd ~/s || exit 1
srun --kill-on-bad-exit=1 python -m experiments.sweep '--gin_file=a b.gin'
END
""",
    ("gke", "--cluster", "c", "--tpu_type", "v5litepod-16", "--image", "i"): """\
xpk workload create --workload=speccascade --cluster=c --tpu-type=v5litepod-16 --docker-image=i \
'--command=cd speccascade_jax && python -m experiments.sweep '"'"'--gin_file=a b.gin'"'"''
""",
}


@pytest.mark.parametrize("given", GOLDEN, ids=" ".join)
def test_a_dry_run_prints_the_commands(given, capsys):
    assert launch.main([*given, "--dry_run", *SWEEP]) == 0
    assert capsys.readouterr().out == GOLDEN[given]


@pytest.mark.parametrize(("given", "message"), [
    (["local"], "error: no command: put it after --"),
    (["local", "--shards", "0", *SWEEP], "error: shards"),
    (["slurm", "--shards", "2", "--processes", "2", *SWEEP], "error: shards=2 and processes=2 exclude each other"),
    (["tpu_vm", "--name", "a", "--zone", "b", *SWEEP], "error: gcloud is not installed here: --dry_run prints"),
])  # fmt: skip
def test_a_failed_start_gives_one_line_of_error(given, message, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert launch.main(given) == 1
    assert capsys.readouterr().err.startswith(message)


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
