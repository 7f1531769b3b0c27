# Starts a command with limits for each of its processes.
#
# $1 seconds of CPU time; $2 blocks of 512 bytes of a file; $3 KiB of memory, or unlimited; $4 true
# for the line `ready` on stderr; then the command.
set -eu
ulimit -c 0
ulimit -t "$1"
ulimit -f "$2"
[ "$3" = unlimited ] || ulimit -v "$3"
ulimit -n 256
[ "$4" = false ] || echo ready >&2
shift 4
exec "$@"
