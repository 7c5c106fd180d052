#!/bin/bash
# Agents for the run of controller.sh, one for each element of a job array, on a partition whose jobs are preempted.
# One that is preempted hands its work to the other workers, and joins the run again when Slurm has started it again.
#
#SBATCH --job-name=elaswave-agents
#SBATCH --partition=preemptible
#SBATCH --nodes=1
#SBATCH --cpus-per-task=2
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

SHARED=${SHARED:?the folder of controller.sh}
WORKERS=${WORKERS:-${SLURM_CPUS_PER_TASK:-1}}
DRAIN=${DRAIN-20} # seconds; below Slurm's KillWait, which is 30 unless the site has another one

# USR1 comes to this shell alone: before the time limit, and before a preemption where the site has
# PreemptParameters=send_user_signal. TERM comes to all processes of the job, so the agent has it already.
came='' left='' process=''
trap 'came=USR1 left=USR1; [ -z "$process" ] || kill -TERM "$process"' USR1
trap 'came=TERM left=TERM' TERM
wait_for() { # a process of this shell, whatever signal comes meanwhile
  process=$1
  while came=''; wait "$process"; code=$?; [ -n "$came" ]; do :; done
  process=''
}

# A controller that was queued again has another address. The file `ended` is there when the run is over.
until [ -n "$left" ] || [ -e "$SHARED/ended" ]; do
  if [ -e "$SHARED/address" ]; then
    elaswave-spmd agent "$(cat "$SHARED/address")" --token-file "$SHARED/token" --workers "$WORKERS" \
      --timeout 60 ${DRAIN:+--drain "$DRAIN"} &
    wait_for $!
    [ "$code" != 2 ] || exit 2 # refused: trying again would change nothing
  fi
  if [ -z "$left" ] && [ ! -e "$SHARED/ended" ]; then
    sleep "${PAUSE:-5}" &
    wait $! # a signal ends the wait
    kill $! 2> /dev/null
  fi
done

# Slurm itself queues again what it has preempted.
[ "$left" != USR1 ] || scontrol requeue "$SLURM_JOB_ID"
