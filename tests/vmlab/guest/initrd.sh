#!/bin/busybox sh
# /init of the initrd: load the modules of the root disk in their order, mount it, go on there.
bb=/bin/busybox
$bb mount -t devtmpfs dev /dev
$bb mount -t proc proc /proc
for module in /modules/*; do $bb insmod "$module" || echo "VMLAB failed: insmod $module"; done
tries=0
until [ -b /dev/vda ] || [ $tries -gt 200 ]; do
    $bb usleep 50000
    tries=$((tries + 1))
done
$bb mount -t ext4 -o rw,noatime /dev/vda /root || echo "VMLAB failed: no root disk"
$bb umount /proc
$bb mount --move /dev /root/dev
exec $bb switch_root /root /sbin/vmlab-init
