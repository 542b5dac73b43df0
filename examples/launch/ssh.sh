#!/usr/bin/env bash
# Start one training on several hosts from here, over ssh without a password:
#
#   HOSTS="10.0.0.1 10.0.0.2" bash ssh.sh tiny --data datasets/mine --run-dir runs/first --nproc 2
#
# HOSTS   names or addresses under which the hosts reach each other; the first one is where they meet
# FOLDER  where to work on each of them (default: the path of this folder)
# SHOAL   the program there (default: shoal)
# PORT    a port that is free on the first host (default: 29400)
#
# Ctrl-C stops all hosts with everything saved (status 75); the same line goes on from there.
set -euo pipefail
read -r -a hosts <<< "${HOSTS:?usage: HOSTS=\"ADDRESS ADDRESS\" ssh.sh CONFIG [options of shoal train]}"
folder=$(printf %q "${FOLDER:-$PWD}")
words=$(printf '%q ' "${SHOAL:-shoal}" train "$@" --nnodes "${#hosts[@]}" --rdzv "${hosts[0]}:${PORT:-29400}")
pid_file=.launcher-$$

stop() { ssh "${hosts[0]}" "kill -TERM \$(cat $folder/$pid_file-0)" || true; }
trap stop INT TERM

sessions=()
for node in "${!hosts[@]}"; do
    ssh "${hosts[node]}" "cd $folder && echo \$\$ > $pid_file-$node && exec $words --node-rank $node" &
    sessions+=($!)
done

while [ -n "$(jobs -rp)" ]; do sleep 1 || true; done
status=0
for node in "${!hosts[@]}"; do
    ended=0
    wait "${sessions[node]}" || ended=$?
    if ((ended > status)); then status=$ended; fi
    ssh "${hosts[node]}" "rm -f $folder/$pid_file-$node" || true
done
exit "$status"
