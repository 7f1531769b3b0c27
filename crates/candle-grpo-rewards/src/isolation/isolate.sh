# Starts a command in a new root with few, read-only folders, without rights over the system.
# It is process 1 of its PID namespace, so that the kernel ends all others with it.
#
# $1 an empty folder, for the new root; $2 a folder whose files are copied; $3 the bytes of all
# files; $4 a cgroup, or empty; $5 root or user, the kind of namespaces; $6 the number of processes.
# Then the visible paths, --, and the command.
set -eu
root=$1 files=$2 size=$3 cgroup=$4 kind=$5 processes=$6
shift 6
umask 022

# If memory runs out, the kernel ends these processes first.
echo 1000 2> /dev/null > /proc/self/oom_score_adj || :
[ -z "$cgroup" ] || echo 0 > "$cgroup/cgroup.procs"

mount -t tmpfs -o "size=$size,nr_inodes=16k,mode=755,nosuid,nodev" tmpfs "$root"
mkdir "$root/dev" "$root/dev/shm" "$root/proc" "$root/tmp" "$root/work" "$root/.old"
# These stay writable when the rest becomes read-only. All have one size together.
for folder in work tmp dev/shm; do
  mount --bind "$root/$folder" "$root/$folder"
done
cp -R "$files/." "$root/work"
[ "$kind" = user ] || chown -R 65534:65534 "$root/work"
while [ "$1" != -- ]; do
  path=$1
  shift
  parent=$root${path%/*}
  [ -d "$parent" ] || mkdir -p "$parent"
  if [ -L "$path" ]; then
    ln -s "$(readlink "$path")" "$root$path"
    continue
  elif [ -d "$path" ]; then
    [ -d "$root$path" ] || mkdir "$root$path"
  elif [ -e "$path" ]; then
    : > "$root$path"
  else
    continue
  fi
  mount --bind -o ro,nosuid,nodev "$path" "$root$path"
  if [ -w "$root$path" ]; then
    echo "$path: writable, must be read-only" >&2
    exit 1
  fi
done
shift
for device in null zero random urandom; do
  : > "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done

cd "$root"
# Some containers forbid it. Programs rarely need it.
mount -t proc -o nosuid,nodev,noexec proc proc 2> /dev/null || {
  bound=proc/sys/user/max_user_namespaces
  mkdir -p "${bound%/*}"
  : > "$bound"
  mount --bind "/$bound" "$bound" 2> /dev/null || :
}
pivot_root . .old
cd /
umount -l /.old
rmdir /.old
chmod 1777 /tmp /dev/shm
mount -o remount,bind,ro,nosuid,nodev /

# The last user namespace is that of the program, which cannot make others: in one of its own it
# would have all capabilities. Its own are gone.
restrict='
  echo 0 2> /dev/null > /proc/sys/user/max_user_namespaces || :
  processes=$1
  shift
  exec prlimit --nproc="$processes:$processes" \
    setpriv --ambient-caps=-all --bounding-set=-all --inh-caps=-all --no-new-privs "$@"'
cd /work
status=0
if [ "$kind" = root ]; then
  # A user namespace of its own has its own count of processes.
  setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs \
    unshare --user --map-current-user --keep-caps \
    sh -c "$restrict" restrict "$processes" "$@" || status=$?
else
  # Two of its processes are not the program: this one, and the one that made the namespaces.
  sh -c "$restrict" restrict "$((processes + 2))" "$@" || status=$?
fi
exit "$status"
