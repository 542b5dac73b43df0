#!/bin/bash
# One training on several nodes of a Slurm cluster, in a folder that all nodes see:
#
#   RUN=runs/first sbatch slurm.sh gpt2 --data datasets/mine
#
#SBATCH --job-name=shoal
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
# GPU nodes: add --gpus-per-node=N with N = tasks per node; not --gpus-per-task, which hides a node's GPUs from its tasks.
# Two minutes before the end every rank gets SIGTERM: the run is saved, and the job queued again.
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

run=${RUN:?usage: RUN=FOLDER sbatch slurm.sh CONFIG [options of shoal train]}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# A failure, such as a killed rank, ends all ranks; they start again from the last committed checkpoint.
for attempt in 1 2 3; do
    srun --kill-on-bad-exit=1 shoal train "$@" --run-dir "$run"
    status=$?
    if [ "$status" -eq 0 ] || [ "$status" -eq 2 ]; then break; fi # done or stopped; bad input
    echo "attempt $attempt ended with status $status"
done
if [ "$status" -eq 0 ] && [ -e "$run/ranks/stopped" ]; then # stopped on request, everything is saved
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
