#!/bin/sh
# Every picture of the course, drawn by the tool that the course is about: sh docs/learn/pictures/draw.sh
set -e
cd "$(dirname "$0")"
vpipe draw gpipe -p 4 -m 1 --format svg -o 1-one-microbatch.svg
vpipe draw gpipe -p 4 -m 4 --format svg -o 1-four-microbatches.svg
vpipe draw gpipe -p 4 -m 8 --format svg -o 2-gpipe.svg
vpipe draw 1f1b -p 4 -m 8 --format svg -o 3-1f1b.svg
vpipe draw zb-h1 -p 4 -m 8 --format svg -o 4-zb-h1.svg
vpipe draw zb-v -p 4 -m 8 --format svg -o 4-zb-v.svg
vpipe draw interleaved -p 4 -m 8 -v 2 --format svg -o 4-interleaved.svg
vpipe draw pipedream -p 4 -m 12 --format svg -o 5-pipedream.svg
vpipe draw 6-recompute.csv --format svg -o 6-recompute.svg
vpipe draw 1f1b -p 4 -m 8 --scale 1,1,2,1 --format svg -o 7-imbalance.svg
vpipe draw 1f1b -p 4 -m 8 --latency 0.5 --format svg -o 7-latency.svg
