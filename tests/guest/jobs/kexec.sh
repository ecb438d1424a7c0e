# Another kernel is started without the firmware, while devices are protected and in use: kexec-next.sh is its job.
drivers
load_ours
nvme=$(dev 04.0) card=$(dev 05.0) usb=$(dev 09.0)
mode "$nvme" bounce; mode "$card" lazy window_us=3600000000; mode "$usb" strict
bind "$nvme" nvme; bind "$card" e1000e; bind "$usb" xhci_hcd
for one in "$nvme" "$usb"; do within 20 disk "$one" || bad "kexec" "$one has no disk"; done
check "the next kernel" portcullis-guest load /next/kernel /next/initramfs "$(cat /proc/cmdline)"
for one in "$nvme" "$usb"; do
    node=/dev/$(disk "$one"); within 5 test -b "$node"
    # Behind what is read and written until the end.
    check "$one written" dd if=/bin/busybox of="$node" bs=1M seek=48 conv=fsync
    (while :; do portcullis-guest blocks "$node" --threads 4 --operations 1000 --span 32 --seed "$RANDOM_SEED" >/dev/null; done) &
done
check "card used" use_card e1000e "$card"
up e1000e "$(card "$card")"
sleep 2
[ "$(counter "$nvme" copies)" -gt 0 ] && ok "protected and in use" || bad "protected and in use" "$(counter "$nvme" copies) copies"
check "started" portcullis-guest start
bad "kexec" "the next kernel did not start"
