#!/bin/sh
# Write the package as it was at COMMIT to earlier/COMMIT/src, which git ignores: sh research/earlier_sources.sh COMMIT
set -eu
[ $# -eq 1 ] || { echo "usage: sh $0 COMMIT" >&2; exit 2; }
cd "$(dirname "$0")/.."
rm -rf "earlier/$1"
mkdir -p "earlier/$1"
git archive "$1" src | tar -x -C "earlier/$1"
