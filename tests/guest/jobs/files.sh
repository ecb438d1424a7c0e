# A file system behind each policy: made, filled, read again, checked.
drivers
load_ours
load crc32c_generic; load ext4
grep -q ext4 /proc/filesystems || { echo "skip files: the kernel has no ext4"; ok "nothing to do"; echo end; return 0; }
for way in $MODES; do
    for entry in nvme:04.0 virtio_blk:08.0; do
        name=${entry%%:*}; device=$(dev "${entry##*:}")
        mode "$device" "$way" >/tmp/said 2>&1 || { bad "files $name $way" "$(cat /tmp/said)"; continue; }
        bind "$device" "$(pci_driver $name)"
        within 20 disk "$device"; node=/dev/$(disk "$device"); within 5 test -b "$node"
        check "$name $way: made" /tools/mke2fs -q -F -t ext4 "$node"
        check "$name $way: mounted" mount -t ext4 "$node" /mnt
        for at in 1 2 3 4 5 6; do
            # A program, several times over; then the sums, from the disk.
            for copy in 1 2; do cat /bin/busybox /bin/portcullis-guest; done >"/mnt/file $at"
        done
        cat "/mnt/file 1" | md5sum >/tmp/sum
        umount /mnt; echo 3 >/proc/sys/vm/drop_caches
        mount -t ext4 "$node" /mnt
        right=0
        for at in 1 2 3 4 5 6; do [ "$(md5sum <"/mnt/file $at")" = "$(cat /tmp/sum)" ] && right=$((right + 1)); done
        [ $right = 6 ] && ok "$name $way: read again" || bad "$name $way" "$right of 6 files are right"
        umount /mnt
        check "$name $way: checked" /tools/e2fsck -f -n "$node"
        unbind "$device"
        [ ! -d "$P/devices/$device" ] || check "$name $way given back" put $P/unprotect "$device"
    done
done
[ ! -d $P ] || check "module removed" rmmod portcullis
echo end
