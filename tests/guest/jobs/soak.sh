# For $SECONDS_LONG seconds: all devices in use at once, while policies change and CPUs come and go.
drivers
load_ours
for entry in $DISKS $CARDS; do
    name=${entry%%:*}; device=$(dev "${entry##*:}")
    check "taken $name" mode "$device" bounce
    bind "$device" "$(pci_driver $name)"
done
started=$(cut -d. -f1 /proc/uptime)
left() { [ $(($(cut -d. -f1 /proc/uptime) - started)) -lt "$SECONDS_LONG" ]; }
for entry in $DISKS; do
    name=${entry%%:*}; device=$(dev "${entry##*:}")
    within 30 disk "$device" || { bad "soak $name" "no disk"; continue; }
    node=/dev/$(disk "$device"); within 5 test -b "$node"
    # shellcheck disable=SC2046
    (portcullis-guest blocks "$node" --threads 2 --seconds "$SECONDS_LONG" --seed "$RANDOM_SEED" $(largest "$name") >/tmp/soak.$name 2>&1; echo $? >/tmp/soak.$name.state) &
done
for entry in $CARDS; do
    name=${entry%%:*}; device=$(dev "${entry##*:}")
    (
        times=0
        # At least once, however slow the guest is: a soak without a transfer says nothing.
        while [ $times = 0 ] || left; do
            use_card "$name" "$device" >/tmp/soak.$name 2>&1 || { echo 1 >/tmp/soak.$name.state; exit; }
            times=$((times + 1))
        done
        echo "$times transfers: $(cat /tmp/soak.$name)" >/tmp/soak.$name; echo 0 >/tmp/soak.$name.state
    ) &
done
while left; do
    for way in strict lazy auto bounce; do
        for entry in $DISKS $CARDS; do put "$P/devices/$(dev "${entry##*:}")/policy" $way || bad "soak policy $entry $way" "$(cat /tmp/put)"; done
        sleep 5
        cpu1 0; sleep 1; cpu1 1
    done
done
wait
for entry in $DISKS $CARDS; do
    name=${entry%%:*}; device=$(dev "${entry##*:}")
    [ "$(cat /tmp/soak.$name.state)" = 0 ] && ok "soak $name: $(cat /tmp/soak.$name)" || bad "soak $name" "$(cat /tmp/soak.$name)"
    unbind "$device"
    for count in open_bytes lost_bytes errors; do
        value=$(counter "$device" $count)
        [ "$value" = 0 ] && ok "soak $name $count" || bad "soak $name $count" "$value"
    done
    for count in maps unmaps copied_bytes iommu_maps flushes book_bytes pool_bytes; do
        echo "figure soak | $count | $name: $(counter "$device" $count)"
    done
    check "soak $name given back" put $P/unprotect "$device"
done
check "module removed" rmmod portcullis
echo end
