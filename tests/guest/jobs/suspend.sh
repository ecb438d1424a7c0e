# The machine goes to sleep while devices are in use, by each of $MODES, as far as `pm_test` has it go: all devices are suspended, and for `mem` all
# but one CPU and the IOMMU, too. (Nothing wakes QEMU from s2idle, in Linux's own modes either.) Afterwards each byte is right, also of what
# was under way.
drivers
load_ours
S=/sys/power
USED="nvme:04.0 virtio_blk:08.0 ahci:1f.2 usb:09.0 e1000e:05.0 igb:06.0 virtio_net:07.0"
use() { case $1 in virtio_net | e1000e | igb) use_card "$1" "$2";; *) use_disk "$1" "$2";; esac; }
# sleeps TEST STATE: for five seconds.
sleeps() { put $S/pm_test "$1" && put $S/state "$2"; }
for way in $MODES; do
    for entry in $USED; do
        device=$(dev "${entry##*:}")
        check "${entry%%:*} $way" mode "$device" "$way" && bind "$device" "$(pci_driver "${entry%%:*}")"
    done
    nvme=$(dev 04.0)
    within 20 disk "$nvme"; node=/dev/$(disk "$nvme"); within 5 test -b "$node"
    for how in "devices freeze" "core mem"; do
        grep -q "${how#* }" $S/state || { echo "skip $way, $how: the kernel has no such state"; continue; }
        portcullis-guest blocks "$node" --threads 2 --seconds 12 --seed "$RANDOM_SEED" >/tmp/load 2>&1 &
        load_id=$!
        sleep 2
        # shellcheck disable=SC2086
        check "$way, $how: slept" sleeps $how
        if wait $load_id; then ok "$way, $how: what was under way: $(cat /tmp/load)"; else bad "$way, $how: what was under way" "$(cat /tmp/load)"; fi
        for entry in $USED; do check "$way, $how: ${entry%%:*}" use "${entry%%:*}" "$(dev "${entry##*:}")"; done
    done
    for entry in $USED; do
        device=$(dev "${entry##*:}")
        unbind "$device"
        [ -d "$P/devices/$device" ] || continue
        for count in open_bytes lost_bytes errors; do
            value=$(counter "$device" $count)
            [ "$value" = 0 ] && ok "$way ${entry%%:*} $count" || bad "$way ${entry%%:*} $count" "$value"
        done
        check "$way ${entry%%:*} given back" put $P/unprotect "$device"
    done
done
[ ! -d $P ] || check "module removed" rmmod portcullis
echo end
