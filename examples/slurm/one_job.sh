#!/bin/bash
# One job: the controller on its first node, an agent on each other node. The arguments are the run's settings:
#
#   sbatch examples/slurm/one_job.sh mesh=dp8
#
# The workers have to fit: WORKERS (below) on each node. All nodes see the folder that the job is submitted from, and
# have elaswave-spmd on their PATH. docs/engines.md says what happens at which signal.
#
#SBATCH --job-name=elaswave
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
set -u

WORKERS=${WORKERS:-${SLURM_CPUS_PER_TASK:-1}}
PORT=${PORT:-29600}
RUN=${RUN:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_ID}
AGENTS=$((SLURM_JOB_NUM_NODES - 1))
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

mkdir -p "$(dirname "$RUN")" || exit
[ -e "$RUN.token" ] || (umask 077; openssl rand -hex 32 > "$RUN.token") || exit

# A job that was requeued goes on. Its settings are in the directory of the run.
if compgen -G "$RUN/checkpoints/*" > /dev/null; then
  settings=(train.resume="$RUN")
else
  [ ! -e "$RUN" ] || mv "$RUN" "$RUN.without_checkpoint.$(date +%s)" || exit
  settings=(run.dir="$RUN" checkpoint.every=100 "$@")
fi

# Agents do not end the job: the run goes on without a node that is lost.
srun --nodes="$AGENTS" --ntasks="$AGENTS" --relative=1 --kill-on-bad-exit=0 --no-kill \
  elaswave-spmd agent "$HEAD:$PORT" --token-file "$RUN.token" --workers "$WORKERS" &
agents=$!

elaswave-spmd train "${settings[@]}" runtime.rendezvous="$HEAD:$PORT" runtime.agents="$AGENTS" \
  runtime.transport=tcp runtime.token_file="$RUN.token" &
controller=$!

# USR1 comes to this shell alone, before the time limit: the run saves its state, and the job is queued again.
# TERM comes to all processes of the job, so the controller has it already: a second one would end it at once.
came='' asked=no
trap 'came=USR1 asked=yes; kill -TERM "$controller"' USR1
trap 'came=TERM' TERM
while came=''; wait "$controller"; code=$?; [ -n "$came" ]; do :; done # a signal ends a wait

[ "$code" != 2 ] || kill "$agents" # refused: agents would wait for the controller
wait "$agents"
if [ "$asked" = yes ] && [ "$code" = 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" = 0 ]; then
  rm -f "$RUN.token"
fi
exit "$code"
