#!/bin/sh
# PID 1 of a node. Kernel command line: vmlab.node=N (1 or 2).
#
# No systemd: these few commands take seconds in software emulation, a distribution's start takes a minute. What goes wrong
# is told on the console, which the lab's folder keeps as nodeNN.console.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C
try() { "$@" || echo "VMLAB failed: $*"; }

try mount -t proc proc /proc
try mount -t sysfs sysfs /sys
mkdir -p /dev/pts /dev/shm
try mount -t devpts devpts /dev/pts
# A tmpfs takes what it holds, not what it may hold; /dev/shm may hold the 8 GiB that the preflight demands.
try mount -t tmpfs -o mode=1777,size=16g shm /dev/shm
try mount -t tmpfs -o mode=755 run /run
try mount -t tmpfs -o mode=1777 tmp /tmp

for word in $(cat /proc/cmdline); do
    case $word in vmlab.node=*) number=${word#*=} ;; esac
done
try hostname "node0$number"
echo "node0$number" > /etc/hostname

# eth0 is the data network: a wire to the other node. eth1 is where the lab's ssh comes from, and leads nowhere else.
try ip link set lo up
try ip link set eth0 mtu 9000 up
try ip address add "10.77.0.$number/24" dev eth0
try ip link set eth1 up
try ip address add 10.0.2.15/24 dev eth1

ulimit -l unlimited
ulimit -n 1048576
mkdir -p /run/sshd
try /usr/sbin/sshd -E /run/sshd.log
echo "VMLAB sshd"

try modprobe rdma_rxe
try modprobe rdma_ucm
try rdma link add rxe0 type rxe netdev eth0

# chronyd -x compares clocks and leaves them alone: the lab sets both, and the first one it set would drag the other along.

# NFS 4 only: no rpcbind, no statd. Node 1 serves the shared folder, node 2 mounts it.
mkdir -p /mnt/shared /run/rpc_pipefs
if [ "$number" = 1 ]; then
    try modprobe nfsd
    try mount -t nfsd nfsd /proc/fs/nfsd
    try exportfs -ra
    try rpc.mountd -N 3
    # What a server with more memory offers by itself: requests of 1 MiB.
    echo 1048576 > /proc/fs/nfsd/max_block_size || echo "VMLAB failed: max_block_size"
    # Short leases: the server refuses to open files until clients of an earlier life had this long to claim theirs.
    try rpc.nfsd --grace-time 10 --lease-time 10 -N 3 4
    try chronyd -x -f /etc/chrony/server.conf
else
    try modprobe nfsv4
    # Node 1 may be later than this one.
    tries=0
    until mount -t nfs4 -o hard,vers=4.2 node01:/mnt/shared /mnt/shared 2> /run/mount.log || [ $tries -gt 60 ]; do
        sleep 1
        tries=$((tries + 1))
    done
    mountpoint -q /mnt/shared || { echo "VMLAB failed: mount"; cat /run/mount.log; }
    try chronyd -x -f /etc/chrony/client.conf
fi
touch /run/vmlab-ready
echo "VMLAB ready"

# Reap what loses its parent.
while :; do
    wait
    sleep 1000
done
