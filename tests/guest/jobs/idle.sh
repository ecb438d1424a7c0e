# The module is loaded, and no device taken: what maps and unmaps take is what it was, to the instruction, and every device's maps go where
# they went. The clock counts instructions; the least of many calls is compared, as interrupts come between some.
load virtio_iommu
echo 0 >$PCI/drivers_autoprobe
device=$(dev 0b.0)
load portcullis_bench
grouped "$device" portcullis_bench
R=/sys/module/portcullis_bench/parameters
# look WHEN: what each mode takes, and where the maps of all devices go.
look() {
    : >/tmp/least.$1
    for way in $MODES; do
        mode "$device" "$way" >/tmp/said 2>&1 || { bad "idle $way" "$(cat /tmp/said)"; continue; }
        bind "$device" portcullis_bench
        for words in "1 1 3000 split" "1 16 3000 split"; do
            echo "$words" >$R/run || { bad "idle $way $words" "$(dmesg | tail -n 1)"; continue; }
            read -r _ _ _ _ _ _ _ least _ <$R/result
            echo "$way, $words: $least" >>/tmp/least.$1
            pages=${words#1 }
            echo "figure least instructions in map and unmap | $way, ${pages%% *} pages | $1: $least"
        done
        unbind "$device"
    done
    cat $R/hooks >/tmp/hooks.$1
}
settle
look before
check "module loaded" load portcullis
look loaded
[ -z "$(ls $P/devices)" ] && ok "no device was taken" || bad "no device was taken" "$(ls $P/devices)"
check "module removed" rmmod portcullis
look after
[ "$(wc -l </tmp/least.before)" -ge 4 ] && ok "measured" || bad "measured" "$(cat /tmp/least.before)"
[ "$(wc -l </tmp/hooks.before)" -ge 8 ] && ok "devices seen" || bad "devices seen" "$(cat /tmp/hooks.before)"
for when in loaded after; do
    check "instructions as before, $when" cmp /tmp/least.before /tmp/least.$when
    check "hooks as before, $when" cmp /tmp/hooks.before /tmp/hooks.$when
done
rmmod portcullis_bench
echo end
