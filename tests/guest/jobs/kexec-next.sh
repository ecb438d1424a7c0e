# After kexec.sh: the devices that were protected work, first as Linux drives them and then protected anew, and no access of theirs was refused.
drivers
nvme=$(dev 04.0) card=$(dev 05.0) usb=$(dev 09.0)
used() {
    local node pair driver device
    for pair in "nvme $nvme" "xhci_hcd $usb"; do
        driver=${pair% *} device=${pair#* }
        bind "$device" "$driver"; within 20 disk "$device" || { bad "$1 $driver" "no disk"; continue; }
        node=/dev/$(disk "$device"); within 5 test -b "$node"
        dd if="$node" bs=1M skip=48 2>/dev/null | head -c "$(wc -c </bin/busybox)" | cmp -s - /bin/busybox &&
            ok "$1 $driver: what the other kernel wrote" || bad "$1 $driver" "what the other kernel wrote is not there"
        check "$1 $driver: is used" portcullis-guest blocks "$node" --threads 4 --operations 40 --span 32 --seed "$RANDOM_SEED"
    done
    bind "$card" e1000e
    check "$1 e1000e: is used" use_card e1000e "$card"
    for device in "$nvme" "$usb" "$card"; do unbind "$device"; done
}
used "the next kernel"
load_ours
for device in "$nvme" "$usb" "$card"; do check "protected anew" mode "$device" bounce; done
used "protected anew"
for device in "$nvme" "$usb" "$card"; do check "given back" put $P/unprotect "$device"; done
check "module removed" rmmod portcullis
echo end
