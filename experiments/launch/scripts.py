"""Shell scripts that run on the hosts of a launch: the environment, the loop that restarts, and their logs.

A command is restarted only after the exit statuses in `RESTARTED`. Status 1 is a user's error, which would recur.
Sources: docs.astral.sh/uv (installer, `uv venv`, `uv pip`); docs.cloud.google.com/sdk/gcloud/reference/storage/cp.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

RESTARTED = (75, 143)
"""Exit statuses after which the same command continues.

75 is `hosts.STATUS`: another process has died. 143 is the status after SIGTERM, when the state is saved.
"""
CODE = "speccascade.tar.gz"
"""File name of the code that a launch sends to the hosts."""
SCRIPT = "speccascade.sh"
"""File name of the script that a launch sends to the hosts."""
ACTIVATE = 'export PATH="$PWD/.venv/bin:$PATH" SPECCASCADE_COMPILATION_CACHE="$PWD/.xla"'
"""Line that makes `python` the one of the folder's environment, and keeps compiled programs on the host's own disk."""


def environment(extra: str) -> str:
    """Returns lines that make or update the environment of the current folder, with an extra such as `tpu`.

    The machines of TPUs have Python 3.10, so uv brings 3.11, the version of constraints.txt.
    """
    return f"""\
export PATH="$HOME/.local/bin:$PATH" &&
  {{ command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh; }} &&
  {{ test -x .venv/bin/python || uv venv --python 3.11; }} &&
  uv pip install --constraint constraints.txt '.[{extra}]'"""


def variables(values: Mapping[str, str | int], command: Sequence[str]) -> str:
    """Returns lines that set shell variables, and the command as the array `command`."""
    lines = [f"{name}={shlex.quote(str(value))}\n" for name, value in values.items()]
    return "".join(lines) + f"command=({shlex.join(command)})\n"


RESTARTING = """\
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
    STATUSES) test "$restarts" -lt "$max_restarts" || break ;;
    *) break ;;
  esac
  restarts=$((restarts + 1))
  sleep 10 &
  wait "$!"
done
""".replace("STATUSES", "|".join(map(str, RESTARTED)))
"""Lines that run the array `command` again while its status is in `RESTARTED`, at most `max_restarts` times.

The script's own SIGTERM is passed on to the command and ends the loop. Afterwards `status` is the last exit status, and
`stopping` is set after SIGTERM.
"""


def on_tpu_vm(command: Sequence[str], folder: str, max_restarts: int, *, as_is: bool) -> str:
    """Returns the script of one host of a TPU VM: unpacks the code, makes the environment, runs the command.

    Args:
        folder: place of the code below the home folder, written for a shell.
        as_is: whether the folder is used as it is, without new code or a new environment.
    """
    prepare = "" if as_is else f"tar xzf ~/{CODE} &&\n  {environment('tpu')} || exit 1\n"
    return f"""\
#!/bin/bash
{variables({"max_restarts": max_restarts}, command)}\
cd && mkdir -p {folder}/logs && cd {folder} || exit 1
exec > >(tee -a "logs/$(hostname).log") 2>&1
exec 9> .lock
flock --nonblock 9 || {{ echo "error: another run goes on in {folder}: wait for its end"; exit 1; }}
echo $$ > .pid
{prepare}{ACTIVATE}
{RESTARTING}\
exit "$status"
"""


_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes"
_QUEUED_HOST = f"""\
export HOME=/root PATH="$PATH:/snap/bin"
cd "$(dirname "$0")" || exit 1
host=$(curl -sf -H Metadata-Flavor:Google {_METADATA}/agent-worker-number)
log="$PWD/host-$host.$(date -u +%Y%m%dT%H%M%SZ).log"
exec > "$log" 2>&1
copy_log() {{ gcloud storage cp "$log" "$place/logs/" > /dev/null 2>&1; }}
while sleep 60; do copy_log; done &
copier=$!
prepare() (
  gcloud storage cp "$place/{CODE}" . && mkdir -p code && tar xzf {CODE} -C code && cd code &&
  {environment("tpu")}
)
if {{ prepare || {{ sleep 60; prepare; }}; }} && cd code; then
{ACTIVATE}
{RESTARTING}\
else
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
"""
"""Script of one host of a queued resource; it reads the host's number where JAX's `cloud_tpu_cluster.py` reads it."""


def on_queued_resource(
    command: Sequence[str], name: str, location: Sequence[str], place: str, max_restarts: int
) -> str:
    """Returns the startup script of a queued resource, which every host runs as root whenever it starts.

    systemd runs the work as a service, so that SIGTERM reaches it at a shutdown while the network is still there.
    Source: freedesktop.org/software/systemd/man (systemd-run, systemd.kill).

    Args:
        location: flags of gcloud that name zone and project.
        place: folder of the launch in a bucket.
    """
    values: dict[str, str | int] = {"name": name, "place": place, "max_restarts": max_restarts}
    return f"""\
#!/bin/bash
mkdir -p /opt/speccascade
cat > /opt/speccascade/{SCRIPT} <<'RUN'
{variables(values, command)}\
location=({shlex.join(location)})
{_QUEUED_HOST}\
RUN
systemd-run --unit=speccascade --property=KillMode=mixed --property=TimeoutStopSec=30 \\
  --property=After=network-online.target bash /opt/speccascade/{SCRIPT}
"""


_WATCHING = """\
resource() { gcloud compute tpus queued-resources "$1" "$name" "${location[@]}" "${@:2}"; }
state() {
  local said
  if said=$(resource describe '--format=value(state.state)' 2>&1); then
    echo "${said##*$'\\n'}"
  elif [[ $said == *NOT_FOUND* ]]; then
    echo ABSENT
  else
    echo UNKNOWN
  fi
}
remove() { resource delete --force --quiet; }
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
    ABSENT) "${create[@]}" || exit 1 ;;
    SUSPENDED) remove ;;
    FAILED) resource describe; remove; exit 1 ;;
  esac
  sleep 60
  now=$(state)
done
"""
"""Script that creates a queued resource, and creates it again when it is suspended, until a host reports the end."""


def watching(name: str, location: Sequence[str], place: str, create: Sequence[str]) -> str:
    """Returns a loop for the user's machine, which creates a queued resource again until the command has ended.

    A spot slice that is preempted becomes SUSPENDED and never runs again, so it is deleted and created anew. The loop
    may be stopped and started again at any time.

    Args:
        create: the command that creates the queued resource.
    """
    return f"""\
name={shlex.quote(name)}
place={shlex.quote(place)}
location=({shlex.join(location)})
create=({shlex.join(create)})
{_WATCHING}"""
