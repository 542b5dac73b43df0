#!/bin/sh
# Two machines and a terminal on each: run this same line in both.
#
#   sh two-terminals.sh 10.0.0.1:29400 tiny --data datasets/mine --run-dir runs/first --nproc 2
#
# 10.0.0.1 is an address of one of the two that the other one reaches, and the port is free there. After it comes
# what `shoal train` takes. To check both machines first, in the same way:
#
#   shoal doctor --nnodes 2 --rdzv 10.0.0.1:29400 --data datasets/mine
#
# Ctrl-C in either terminal stops both with everything saved; the same line goes on from there.
rdzv=${1:?usage: two-terminals.sh HOST:PORT CONFIG [options of shoal train]}
shift
exec shoal train "$@" --nnodes 2 --rdzv "$rdzv"
