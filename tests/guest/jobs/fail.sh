# Memory runs out during I/O, or Linux refuses to map: an I/O may fail, no byte is wrong, and afterwards all is as before.
drivers
load_ours
D=/sys/kernel/debug
M=/sys/module/portcullis
F=/sys/module/portcullis_faults/parameters
nvme=$(dev 04.0) card=$(dev 05.0)

# Of how many pages one is refused. Later kernels' nvme maps each page of a request by itself, and Linux tries a request again until all of
# them are mapped: of 256 one in 7 would be refused for ever.
case $(uname -r) in 6.1.* | 6.12.*) pages=7;; *) pages=401;; esac
low=$(cat $M/sections/.text) size=$(cat $M/coresize)
load portcullis_faults "first=$low" "last=$(printf '0x%x' $((low + size)))" || echo "kprobes: $(dmesg | tail -n 1)"
# How allocations fail: the module's own testing parameters in any kernel; Linux's fault injection where the kernel has it, for calls from the module alone.
begin() {
    case $1 in
    heap) echo 13 >$M/parameters/fail_heap;;
    frames) echo $pages >$M/parameters/fail_frames;;
    failslab | fail_page_alloc)
        [ -d $D/$1 ] || return 1
        echo "$low" >$D/$1/require-start; printf '0x%x' $((low + size)) >$D/$1/require-end
        echo 24 >$D/$1/stacktrace-depth; echo N >$D/$1/ignore-gfp-wait; echo 0 >$D/$1/verbose
        [ $1 = failslab ] || echo 0 >$D/$1/min-order
        echo -1 >$D/$1/times; echo 1 >$D/$1/interval; echo 10 >$D/$1/probability;;
    # Maps that fail when Linux has mapped all, and are undone.
    maps) [ -d $F ] || return 1; echo 0 >$F/failed; echo $pages >$F/maps;;
    # The same, but some undos leave a page: its memory stays open and its addresses out of use.
    stays) [ -d $F ] || return 1; echo 0 >$F/stayed; echo 3 >$F/kept; echo $pages >$F/maps; dmesg -c >/dev/null;;
    esac
}
finish() {
    case $1 in
    heap) echo 0 >$M/parameters/fail_heap;;
    frames) echo 0 >$M/parameters/fail_frames;;
    maps | stays) echo 0 >$F/maps; echo 0 >$F/kept;;
    *) echo 0 >$D/$1/probability;;
    esac
}
# Each page that stayed is told, with the name of the device. (Pools map so little that perhaps none did.)
told() {
    local stayed lines
    stayed=$(cat $F/stayed) lines=$(dmesg | grep -c "$nvme: portcullis: a map of .* could not be undone")
    case $1 in strict | lazy) [ "$stayed" -gt 0 ] || bad "stays $1" "no page stayed";; esac
    # No flush is confirmed from then on, and what waits for one is told when the queues are full: each CPU's has 256 places.
    [ "$1" != lazy ] || dmesg | grep -q "$nvme: portcullis: unmap .* may go on reaching" || bad "stays lazy" "no unmap says that it is not confirmed"
    [ "$stayed" = "$lines" ] && ok "stays $1: $stayed times told" || bad "stays $1" "$stayed pages stayed, $lines lines say so"
}
for way in $MODES; do
    for fault in heap frames failslab fail_page_alloc maps stays; do
        mode "$nvme" "$way" >/tmp/said 2>&1 || { bad "$fault $way" "$(cat /tmp/said)"; continue; }
        bind "$nvme" nvme; within 20 disk "$nvme" || { bad "$fault $way" "no disk"; continue; }
        node=/dev/$(disk "$nvme"); within 5 test -b "$node"
        if begin $fault 2>/tmp/put; then
            check "$fault $way" portcullis-guest blocks "$node" --threads 4 --operations 150 --seed "$RANDOM_SEED" --errors
            finish $fault
            check "$fault $way afterwards" portcullis-guest blocks "$node" --threads 4 --operations 40 --seed "$RANDOM_SEED"
            case $fault in
            maps) [ "$(cat $F/failed)" -gt 0 ] && ok "$fault $way: maps failed" || bad "$fault $way" "no map failed";;
            stays) told "$way";;
            esac
        else
            echo "skip $fault $way: the kernel has no such fault injection"
        fi
        unbind "$nvme"
        open=$(counter "$nvme" open_bytes) lost=$(counter "$nvme" lost_bytes)
        [ $fault != maps ] || [ "$lost" = 0 ] || bad "maps $way" "$lost bytes of addresses are lost"
        [ "$open" = 0 ] && ok "$fault $way: nothing open" || bad "$fault $way" "$open bytes are open, $lost lost"
        check "$fault $way given back" put $P/unprotect "$nvme"
    done
done
[ ! -d $F ] || rmmod portcullis_faults
check "module removed" rmmod portcullis
echo end
