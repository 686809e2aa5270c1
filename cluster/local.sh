#!/usr/bin/env bash
# A Ray cluster of this one machine, for jobs. The dashboard answers this machine only; Ray's other
# ports listen on every interface, so all of it asks for a token, made anew at each start.
#   cluster/local.sh         start it (or say that it runs), and print how to submit a job
#   cluster/local.sh env     print its address and token for the shell: eval "$(cluster/local.sh env)"
#   cluster/local.sh stop    end it and all of its processes, and remove its files
# PORT, DASHBOARD_PORT, AGENT_PORT and CLIENT_PORT (6379, 8265, 52365, 10001) must be free; logs and
# token are in D3D_RAY_DIR; what stands behind `start` goes to `ray start`, such as --num-cpus 4.
set -euo pipefail

PORT=${PORT:-6379}
DASHBOARD_PORT=${DASHBOARD_PORT:-8265}
AGENT_PORT=${AGENT_PORT:-52365}
CLIENT_PORT=${CLIENT_PORT:-10001}
DIR=${D3D_RAY_DIR:-${TMPDIR:-/tmp}/d3d-ray-$(id -u)}
PIDS=$DIR/pid
TOKEN=$DIR/token

fail() { echo "$*" >&2; exit 1; }

is_open() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# Processes with our mark: Ray's own, those of jobs, and those that lost their parent.
ours() {
  local file
  for file in /proc/[0-9]*/environ; do
    if grep -qzxF "D3D_RAY_LOCAL=$DIR" "$file" 2>/dev/null; then basename "$(dirname "$file")"; fi
  done
}

runs() { [[ -s $PIDS ]] && ours | grep -qx "$(<"$PIDS")"; }

answers() {
  curl --silent --fail --max-time 2 --output /dev/null \
    --header "Authorization: Bearer $(<"$TOKEN")" "http://127.0.0.1:$(<"$DIR/dashboard")/api/version"
}

settings() {
  echo "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH='$TOKEN'"
  echo "export RAY_API_SERVER_ADDRESS=http://127.0.0.1:$(<"$DIR/dashboard")"
  echo "export RAY_ADDRESS=127.0.0.1:$(<"$DIR/port")"
}

explain() {
  echo "Ray runs: dashboard http://127.0.0.1:$(<"$DIR/dashboard"), logs in $DIR. Submit a job:"
  echo "  eval \"\$(cluster/local.sh env)\""
  echo "  ray job submit --working-dir . -- python jobs/doctor.py"
  echo "End it: cluster/local.sh stop"
}

start() {
  local name seconds
  if runs; then explain; return; fi
  if [[ -e $DIR/port ]]; then stop >/dev/null; fi  # What a crash left behind.
  # `stop` removes the folder, so it must be ours alone.
  [[ ! -e $DIR ]] || fail "$DIR exists and is not of this script: remove it, or set D3D_RAY_DIR"
  command -v ray >/dev/null || fail "There is no ray on the PATH: source .venv/bin/activate"
  for name in PORT DASHBOARD_PORT AGENT_PORT CLIENT_PORT; do
    if is_open "${!name}"; then
      fail "Port ${!name} is taken, probably by another Ray. Submit jobs to that one, end it with" \
        "\`ray stop\`, or start beside it: $name=<a free port> cluster/local.sh"
    fi
  done
  (umask 077; mkdir -p "$DIR"; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$TOKEN")
  echo "$PORT" >"$DIR/port"
  echo "$DASHBOARD_PORT" >"$DIR/dashboard"
  D3D_RAY_LOCAL=$DIR RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$TOKEN \
    setsid nohup ray start --head --block --node-ip-address 127.0.0.1 --port "$PORT" \
    --dashboard-host 127.0.0.1 --dashboard-port "$DASHBOARD_PORT" \
    --dashboard-agent-listen-port "$AGENT_PORT" --ray-client-server-port "$CLIENT_PORT" \
    --temp-dir "$DIR/ray" --disable-usage-stats "$@" >"$DIR/log" 2>&1 </dev/null &
  echo $! >"$PIDS"
  for ((seconds = 0; seconds < 90; seconds++)); do
    if answers; then explain; return; fi
    runs || break
    sleep 1
  done
  tail -n 20 "$DIR/log" >&2
  stop >/dev/null
  fail "Ray did not start; above are the last lines of its log."
}

stop() {
  local seconds
  if [[ ! -e $DIR/port ]]; then echo "Nothing to stop: there is no $DIR"; return; fi
  if runs; then kill -TERM "$(<"$PIDS")"; fi
  for ((seconds = 0; seconds < 30; seconds++)); do
    [[ -n $(ours) ]] || break
    # Ray ends its own in order; whatever is left after that is not waited for.
    if ((seconds >= 15)); then ours | xargs --no-run-if-empty kill -KILL 2>/dev/null || true; fi
    sleep 1
  done
  [[ -z $(ours) ]] || fail "These processes did not end: $(ours | tr '\n' ' ')"
  rm -rf "$DIR"
  echo "Stopped."
}

case ${1:-start} in
  start) shift || true; start "$@" ;;
  stop) stop ;;
  env) runs || fail "Ray does not run: cluster/local.sh"; settings ;;
  *) fail "Usage: cluster/local.sh [start [options of ray start] | env | stop]" ;;
esac
