# Starts a command with limits for each of its processes, after the line `ready` on stderr.
#
# $1 seconds of CPU time; $2 blocks of 512 bytes of a file; $3 KiB of memory, or unlimited; then the
# command.
set -eu
ulimit -c 0
ulimit -t "$1"
ulimit -f "$2"
[ "$3" = unlimited ] || ulimit -v "$3"
ulimit -n 256
shift 3
echo ready >&2
exec "$@"
