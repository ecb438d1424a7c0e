# The command `portcullis`, as its user gives it: a disk with files on it protected, switched while it works, and given back; a network
# card; and what it refuses.
drivers
load_ours
load ext4; load crc32c_generic
grep -q ext4 /proc/filesystems || { echo "skip commands: the kernel has no ext4"; ok "nothing to do"; echo end; return 0; }
device=$(dev 04.0)
bind "$device" nvme; bind "$(dev 05.0)" e1000e
within 20 disk "$device"; node=/dev/$(disk "$device"); within 5 test -b "$node"

# says NAME TEXT COMMAND..: holds if the command says that, whether or not it succeeds.
says() {
    local what=$1 text=$2; shift 2
    "$@" 2>&1 | tr -s '\n ' ' ' >/tmp/said
    if grep -q -e "$text" /tmp/said; then ok "$what"; else bad "$what" "$(cat /tmp/said)"; fi
}
mounted() { within 5 test -b "$node" && mount -t ext4 "$node" /mnt; }
right() { [ "$(md5sum <"/mnt/file")" = "$sum" ] && ok "$1: the file is right" || bad "$1" "the file is wrong"; }

says "nothing is protected" "protects none of these" portcullis status
check "made" /tools/mke2fs -q -F -t ext4 "$node"
check "mounted" mounted
cat /bin/busybox /bin/portcullis-guest >/mnt/file; sum=$(md5sum </mnt/file)
says "what stops is said" "the file system at /mnt is on it" portcullis protect "$node" --policy bounce
[ -d "$P/devices/$device" ] && bad "asked first" "it is protected" || ok "asked first"
umount /mnt
check "protected" portcullis protect "$node" --policy bounce --yes
check "mounted behind it" mounted
right "protected"
says "its status" "bounce, copies up to 128 KiB" portcullis status "$node"

# Whatever the policy, and while it changes.
(at=0; while [ ! -e /tmp/enough ]; do at=$((at + 1)); cat /bin/busybox >/mnt/more; sync; cat /mnt/more | cmp -s - /bin/busybox || echo "pass $at" >>/tmp/wrong; done) &
for policy in "lazy --window-us 1000" strict "bounce --threshold 4096" auto; do
    # shellcheck disable=SC2086
    check "switched to $policy" portcullis protect "$(basename "$node")" --policy $policy
    sleep 1
done
touch /tmp/enough; wait
[ -e /tmp/wrong ] && bad "files while it switches" "$(cat /tmp/wrong)" || ok "files while it switches"
says "the policy" " auto, " portcullis status "${device#0000:}"
umount /mnt; echo 3 >/proc/sys/vm/drop_caches
check "mounted again" mounted
right "switched"
umount /mnt
check "given back" portcullis unprotect "$node" --yes
[ ! -d "$P/devices/$device" ] && ok "Linux has it" || bad "Linux has it" "$P/devices/$device"
check "mounted by Linux" mounted
right "given back"
umount /mnt
check "file system checked" /tools/e2fsck -f -n "$node"

card=$(card "$(dev 05.0)")
check "card protected" portcullis protect "$card" --policy strict --yes
check "card used" use_card e1000e "$(dev 05.0)"
check "card given back" portcullis unprotect "$card" --yes

fails "no device" portcullis protect 00:1e.7 --policy strict --yes
says "of two, both" "does not tell them apart\|no driver" portcullis protect 00:1f.2 --policy bounce --yes
check "both given back" portcullis unprotect 00:1f.2 --yes

# Kept, and a boot later: all that a boot takes from here is the file, whose options modprobe gives the module before it loads the drivers.
kept=/etc/modprobe.d/portcullis.conf
mkdir -p ${kept%/*}
check "kept" portcullis protect "$node" --policy bounce --threshold 65536 --keep --yes
check "a rule is kept" portcullis protect driver:e1000e --policy bounce --threshold 65536 --keep
for driver in nvme e1000e; do grep -q "^softdep $driver pre: portcullis$" $kept && ok "$driver waits" || bad "$driver waits" "$(cat $kept)"; done
unbind "$device"; unbind "$(dev 05.0)"
check "given back for the boot" put $P/unprotect "$device"
check "module removed for the boot" rmmod portcullis
# shellcheck disable=SC2046
check "loaded as at a boot" load portcullis $(sed -n 's/^options portcullis //p' $kept)
bind "$device" nvme; bind "$(dev 05.0)" e1000e
within 20 disk "$device"; node=/dev/$(disk "$device")
for one in "$device" "$(dev 05.0)"; do
    says "kept $one" "bounce, copies up to 64 KiB" portcullis status "$one"
done
check "mounted, kept" mounted
right "kept"
umount /mnt
says "its rule takes it again" "would be taken again at once" portcullis unprotect "$node" --yes
check "kept no more" portcullis unprotect "$node" --keep --yes
check "no rule is kept" portcullis unprotect driver:e1000e --keep
[ ! -e $kept ] && ok "the file is gone" || bad "the file is gone" "$(cat $kept)"
unbind "$device"; unbind "$(dev 05.0)"
check "module removed" rmmod portcullis
says "no module" "is not loaded" portcullis status
echo end
