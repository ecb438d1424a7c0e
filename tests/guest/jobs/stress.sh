# Under load: policies change, CPUs come and go, drivers leave and return, a device is pulled out, the module is not removed; afterwards it
# is, and comes again.
drivers
load_ours
nvme=$(dev 04.0) card=$(dev 05.0)
for entry in nvme:04.0 e1000e:05.0 virtio_blk:08.0; do
    device=$(dev "${entry##*:}")
    check "taken ${entry%%:*}" mode "$device" bounce
    bind "$device" "$(pci_driver "${entry%%:*}")"
done
within 20 disk "$nvme"; node=/dev/$(disk "$nvme"); within 5 test -b "$node"
seconds=${SECONDS_OF_LOAD:-8}

# busy NAME COMMAND..: runs while the disk is in use; then the disk must have been right.
busy() {
    name=$1; shift
    portcullis-guest blocks "$node" --threads 3 --seconds "$seconds" --seed "$RANDOM_SEED" >/tmp/load 2>&1 &
    load_id=$!
    "$@" >/tmp/during 2>&1 || bad "$name" "$(tail -n 2 /tmp/during | tr '\n' ' ')"
    if wait $load_id; then ok "$name: $(cat /tmp/load)"; else bad "$name" "$(cat /tmp/load)"; fi
}
switches() {
    at=0
    while kill -0 $load_id 2>/dev/null; do
        for way in strict lazy auto bounce; do
            put "$P/devices/$nvme/policy" $way || return 1
            put "$P/devices/$nvme/window_us" $((1 + at * 997 % 20000)) || return 1
            put "$P/devices/$nvme/threshold" $((4096 << (at % 6))) || return 1
            usleep 150000; at=$((at + 1))
        done
    done
    put "$P/devices/$nvme/policy" bounce
}
plug() {
    [ -w /sys/devices/system/cpu/cpu1/online ] || return 0
    while kill -0 $load_id 2>/dev/null; do
        cpu1 0 || return 1
        usleep 300000
        cpu1 1 || return 1
        usleep 300000
    done
}
removed() { ! rmmod portcullis; }
busy "policies change under load" switches
busy "CPUs come and go under load" plug
busy "the module is not removed under load" removed
both() { use_card e1000e "$card"; }
busy "a network card beside a disk" both

# A driver leaves while its disk is in use: errors are right, and what was written before is.
portcullis-guest blocks "$node" --threads 3 --seconds 6 --seed "$RANDOM_SEED" --errors >/tmp/load 2>&1 &
sleep 2
unbind "$nvme"
wait $!
grep -q WRONG /tmp/load && bad "driver leaves under load" "$(cat /tmp/load)" || ok "driver leaves under load: $(cat /tmp/load)"
open=$(counter "$nvme" open_bytes)
[ "$open" = 0 ] && ok "nothing is open without a driver" || bad "open without a driver" "$open bytes"
bind "$nvme" nvme; within 20 disk "$nvme"
check "driver returns" use_disk nvme "$nvme"

# A device is pulled out while it is in use.
hot=$(basename "$(ls -d $PCI/devices/$(dev 0c.0)/0000:??:??.? 2>/dev/null | head -n 1)")
if [ -n "$hot" ] && grouped "$hot" nvme && mode "$hot" bounce >/tmp/said 2>&1; then
    bind "$hot" nvme; within 20 disk "$hot"
    hot_node=/dev/$(disk "$hot"); within 5 test -b "$hot_node"
    portcullis-guest blocks "$hot_node" --threads 2 --seconds 10 --seed "$RANDOM_SEED" --errors >/tmp/load 2>&1 &
    sleep 2
    echo "host: device_del hot"
    gone() { [ ! -e "$PCI/devices/$hot" ]; }
    within 30 gone && ok "device pulled out" || bad "device pulled out" "it is still there"
    wait $!
    grep -q WRONG /tmp/load && bad "device pulled out under load" "$(cat /tmp/load)" || ok "device pulled out under load: $(cat /tmp/load)"
    [ ! -e "$P/devices/$hot" ] && ok "nothing is left of it" || bad "left of it" "$P/devices/$hot"
else
    bad "device pulled out" "${hot:-no device}: $(cat /tmp/said)"
fi

for entry in nvme:04.0 e1000e:05.0 virtio_blk:08.0; do
    device=$(dev "${entry##*:}")
    unbind "$device"
    errors=$(counter "$device" errors)
    [ "$errors" = 0 ] && ok "no errors of ${entry%%:*}" || bad "errors of ${entry%%:*}" "$errors"
    lost=$(counter "$device" lost_bytes)
    [ "$lost" = 0 ] && ok "nothing lost of ${entry%%:*}" || bad "lost of ${entry%%:*}" "$lost bytes"
    check "given back ${entry%%:*}" put $P/unprotect "$device"
done
for time in 1 2 3; do
    check "module removed, $time" rmmod portcullis
    check "module loaded again, $time" load portcullis
    check "taken again, $time" mode "$nvme" strict
    bind "$nvme" nvme; within 20 disk "$nvme"
    check "disk, $time" use_disk nvme "$nvme"
    unbind "$nvme"
    check "given back again, $time" put $P/unprotect "$nvme"
done
check "module removed" rmmod portcullis
bind "$nvme" nvme; within 20 disk "$nvme"
check "disk as Linux protects it" use_disk nvme "$nvme"
echo end
