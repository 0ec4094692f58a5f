#!/bin/bash
#SBATCH --job-name=vpipe-bert
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --time=02:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60

export MASTER_ADDR=127.0.0.1
export VPIPE_SECRET="$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n')"  # for the ranks of this job alone

run=output/slurm-"$SLURM_JOB_ID"
overrides=()
saved() { compgen -G "$run"/checkpoints/'iteration-*' | sort -V | tail -n 1; }
before=$(saved)
resume=()
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  resume=(--resume latest)  # where there is no checkpoint yet, it begins anew
  echo "vpipe: queued again ($SLURM_RESTART_COUNT); going on from the latest checkpoint, if there is one"
fi

announced=0 step=
trap 'announced=1; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null' USR1
srun --export=ALL --kill-on-bad-exit=1 --nodes=1 --ntasks=4 --ntasks-per-node=4 --distribution=block \
  python -Pm vpipe train configs/bert_4vpipe.yml --output-dir "$run" "${overrides[@]}" "${resume[@]}" &
step=$!; [ "$announced" -eq 0 ] || kill -USR1 "$step" 2>/dev/null  # announced before there was a step
while true; do
  wait "$step"; code=$?
  kill -0 "$step" 2>/dev/null || break  # a signal ends a wait before the step has ended
done
# 75: saved a checkpoint and left; above 128: ended by a signal before it could
if [ "$announced" -eq 1 ] && { [ "$code" -eq 75 ] || [ "$code" -gt 128 ]; }; then
  mkdir -p "$run"; idle=$(cat "$run"/lives-without-progress 2>/dev/null || echo 0)
  if [ "$(saved)" = "$before" ]; then idle=$((idle + 1)); else idle=0; fi
  echo "$idle" > "$run"/lives-without-progress
  if [ "$idle" -ge 3 ]; then
    echo "vpipe: 3 times in a row this job saved nothing new before its end: not queued again; raise --time or lower checkpoint.interval" >&2
    exit "$code"
  fi
  echo "vpipe: interrupted; queueing again"
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$code"
