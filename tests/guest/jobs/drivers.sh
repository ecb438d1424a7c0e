# Each driver in each of $MODES: data written, read and checked; then its device is given back.
drivers
load_ours
for way in $MODES; do
    for entry in $DISKS $CARDS; do
        name=${entry%%:*}; device=$(dev "${entry##*:}")
        case $name in virtio_net | e1000e | igb) use=use_card;; *) use=use_disk;; esac
        [ -e "$PCI/devices/$device" ] || { echo "skip $name $way: the machine has none"; continue; }
        [ -d "$PCI/drivers/$(pci_driver $name)" ] || { echo "skip $name $way: the kernel has no such driver"; continue; }
        if ! mode "$device" "$way" >/tmp/said 2>&1; then
            case $way:$name in
            # Linux changes the mode of a group only where it has one device.
            linux-*:ahci) echo "skip $name $way: $(cat /tmp/said)"; continue;;
            *) bad "$name $way" "$(cat /tmp/said)"; continue;;
            esac
        fi
        bind "$device" "$(pci_driver $name)"
        check "$name $way" $use "$name" "$device"
        [ $name != ahci ] || check "$name $way, 1 MiB" use_large "$device"
        unbind "$device"
        if [ -d "$P/devices/$device" ]; then
            open=$(counter "$device" open_bytes)
            [ "$open" = 0 ] && ok "$name $way closed" || bad "$name $way closed" "$open bytes are open without a driver"
            check "$name $way given back" put $P/unprotect "$device"
        fi
    done
done
[ ! -d $P ] || check "module removed" rmmod portcullis
echo end
