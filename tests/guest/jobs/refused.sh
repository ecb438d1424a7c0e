# What cannot be done is refused, and the log names the device; what a faulty driver does harms nobody.
drivers
load_ours
dmesg -c >/dev/null
nvme=$(dev 04.0) edu=$(dev 0a.0)

# refused NAME FILE WORDS [DEVICE]: the words are refused, and the log names the device.
refused() {
    dmesg -c >/dev/null
    if put "$2" "$3" >/tmp/said 2>&1; then bad "$1" "it succeeded"; return; fi
    [ -z "$4" ] || dmesg | grep portcullis | grep -q "$4" || { bad "$1" "the log does not name $4: $(dmesg | tail -n 1)"; return; }
    ok "$1: $(sed 's/.*write error: //' /tmp/said)"
}
refused "no such device" $P/protect "0000:00:1e.7 policy=strict" 0000:00:1e.7
refused "no such policy" $P/protect "$nvme policy=none" "$nvme"
refused "no words" $P/protect ""
refused "a number too large" $P/protect "$nvme policy=lazy window_us=99999999999999999999999" "$nvme"
refused "a threshold that is none" $P/protect "$nvme policy=bounce threshold=-1" "$nvme"
refused "not protected" $P/unprotect "$nvme" "$nvme"
[ -d "$P/devices/$nvme" ] && bad "nothing was taken" "$(ls $P/devices)" || ok "nothing was taken"
bind "$nvme" nvme; within 20 disk "$nvme"
refused "a driver is bound" $P/protect "$nvme policy=strict" "$nvme"
check "the driver goes on" use_disk nvme "$nvme"
unbind "$nvme"
check "taken" put $P/protect "$nvme policy=bounce"
bind "$nvme" nvme; within 20 disk "$nvme"
refused "given back under a driver" $P/unprotect "$nvme" "$nvme"
refused "no such policy while it runs" "$P/devices/$nvme/policy" none
fails "module removed under a driver" rmmod portcullis
check "the driver goes on, protected" use_disk nvme "$nvme"
unbind "$nvme"
check "given back" put $P/unprotect "$nvme"

load portcullis_edu misuse=1
# A kernel that checks how drivers use the API tells of each misuse, too: one of another length, three of what is not mapped, one sync.
D=/sys/kernel/debug/dma-api
if [ -d $D ]; then
    put $D/all_errors 1
    for one in 1:"frees DMA memory with different size" 1:"DMA-API: Mapped at" 3:"tries to free DMA memory it has not allocated" \
               1:"tries to sync DMA memory it has not allocated" 5:"at kernel/dma/debug.c"; do
        # By four policies.
        echo "expected $((4 * ${one%%:*})) ${one#*:}"
    done
fi
for way in strict lazy bounce auto; do
    mode "$edu" $way >/tmp/said 2>&1 || { bad "misuse $way" "$(cat /tmp/said)"; continue; }
    dmesg -c >/dev/null
    bind "$edu" portcullis_edu
    dmesg >/tmp/log
    grep -q 'edu: end: 0' /tmp/log && ok "misuse $way lived" || bad "misuse $way" "$(grep edu: /tmp/log | tail -n 1)"
    for what in "unmap with another length" "unmap twice" "unmap of what was never mapped"; do
        # What the module said before the next line of the driver's.
        sed -n "/edu: misuse: $what/,/edu: [mw]/p" /tmp/log | grep -q "$edu: portcullis: " &&
            ok "misuse $way: $what is told" || bad "misuse $way: $what" "no line names $edu"
    done
    grep -q 'write after all these: nothing' /tmp/log && ok "misuse $way opens nothing" || bad "misuse $way" "$(grep 'after all' /tmp/log)"
    unbind "$edu"
    check "misuse $way given back" put $P/unprotect "$edu"
done
rmmod portcullis_edu
check "module removed" rmmod portcullis
echo end
