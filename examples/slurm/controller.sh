#!/bin/bash
# The controller of a run whose agents come and go, on a partition that is not preempted. It has workers of its own and
# begins with them. The arguments are the run's settings, SHARED is a folder that all nodes see:
#
#   export SHARED=$PWD/runs/a
#   sbatch examples/slurm/controller.sh mesh=dp2 elastic.max_workers=10
#   sbatch --array=1-4 examples/slurm/agents.sh
#
# docs/engines.md says what happens at which signal.
#
#SBATCH --job-name=elaswave
#SBATCH --partition=stable
#SBATCH --nodes=1
#SBATCH --cpus-per-task=4
#SBATCH --time=7-00:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

SHARED=${SHARED:?a folder that all nodes see}
AGENTS=${AGENTS:-0} # to wait for before the first step
PORT=${PORT:-29600}
RUN=$SHARED/run
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

mkdir -p "$SHARED" || exit
[ -e "$SHARED/token" ] || (umask 077; openssl rand -hex 32 > "$SHARED/token") || exit

if compgen -G "$RUN/checkpoints/*" > /dev/null; then
  settings=(train.resume="$RUN")
else
  [ ! -e "$RUN" ] || mv "$RUN" "$RUN.without_checkpoint.$(date +%s)" || exit
  settings=(run.dir="$RUN" checkpoint.every=100 "$@")
fi

elaswave-spmd train "${settings[@]}" runtime.rendezvous="$HEAD:$PORT" runtime.agents="$AGENTS" \
  runtime.transport=tcp runtime.token_file="$SHARED/token" &
controller=$!
echo "$HEAD:$PORT" > "$SHARED/address.new" && mv "$SHARED/address.new" "$SHARED/address" # agents look for it

# As in one_job.sh.
came='' asked=no
trap 'came=USR1 asked=yes; kill -TERM "$controller"' USR1
trap 'came=TERM' TERM
while came=''; wait "$controller"; code=$?; [ -n "$came" ]; do :; done

rm -f "$SHARED/address"
if [ "$asked" = yes ] && [ "$code" = 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
else
  echo "$code" > "$SHARED/ended" # agents stop looking
fi
exit "$code"
