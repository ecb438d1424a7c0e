# What the DMA API promises drivers, in each of $MODES: a driver calls all of it, and looks by its device. And a device that firmware says is
# outside is told from one that is not.
load virtio_iommu
load_ours
echo 0 >$PCI/drivers_autoprobe
load portcullis_api
behind() { ls "$PCI/devices/$(dev "$1")" | grep '^0000:..:..\..$'; }
edu=$(dev 0a.0)
# Two behind a PCI bridge, which the IOMMU cannot tell apart, or one in place of the bridge; and one behind a port that firmware marks as external.
# shellcheck disable=SC2046
set -- $(behind 0d.0); first=${1:-$(dev 0d.0)} second=$2
outside=$(behind 0e.0)
for device in "$edu" "$first" $second "$outside"; do grouped "$device" portcullis_api; done

# group NAME DEVICE WAY: a group of checks, each a line here. Afterwards as much is mapped as before.
group() {
    local open line
    open=$(counter "$2" open_mappings)
    dmesg -c >/dev/null
    put /dev/portcullis_api "$2 $1 $3"
    dmesg >/tmp/log
    sed -n 's/.*\] api: //p' /tmp/log >/tmp/api
    case $(tail -n 1 /tmp/api) in
    "end: 0") ;;
    "end: -95") echo "skip api $3 $1: the kernel has none"; return;;
    *) bad "api $3 $1" "$(tail -n 1 /tmp/api)";;
    esac
    while IFS= read -r line; do
        case $line in
        "held: "*) ok "api $3 ${line#held: }";;
        "failed: "*) bad "api $3 $1" "${line#failed: }";;
        esac
    done </tmp/api
    [ "$(counter "$2" open_mappings)" = "$open" ] || bad "api $3 $1" "$open mappings before, $(counter "$2" open_mappings) after it"
}

# No call of the group's was refused.
accepted() {
    local before after
    before=$(counter "$2" errors)
    group "$@"
    after=$(counter "$2" errors)
    [ "$after" = "$before" ] || bad "api $3 $1" "$((after - before)) calls were refused: $(grep portcullis: /tmp/log | tail -n 2)"
}

# What the module says names the device and its driver. `misused NAME DEVICE WAY`: each time that the driver is at fault.
says() { grep -q "portcullis_api $1: portcullis: $2" /tmp/log && ok "api $3: $2" || bad "api $3: $2" "no line names $1: $(tail -n 1 /tmp/log)"; }
misused() {
    local before what
    before=$(counter "$2" errors)
    group misuse "$2" "$3"
    for what in "unmap of another's" "unmap of a part" "sync past the end" "free with another length"; do
        sed -n "/api: misuse: $what/,/api: [mhf]/p" /tmp/log | grep -q "portcullis_api $2: portcullis: .*refused" &&
            ok "api $3 $1: $what is told" || bad "api $3 $1: $what" "no line names $2"
    done
    [ "$(counter "$2" errors)" = $((before + 4)) ] || bad "api $3 $1" "$(counter "$2" errors) calls refused in all, $before before"
}

few() { case $1 in *:- | *lazy:[01] | *strict:8 | bounce:8 | auto:8) ;; *) return 1;; esac; }

# A kernel that checks how drivers use the API tells of each misuse, too, by both devices and three policies.
D=/sys/kernel/debug/dma-api
if [ -d $D ] && [ -d $P ]; then
    put $D/all_errors 1
    for one in 1:"frees DMA memory with different size" 1:"DMA-API: Mapped at" 3:"tries to free DMA memory it has not allocated" \
               1:"tries to sync DMA memory it has not allocated" 5:"at kernel/dma/debug.c"; do
        echo "expected $((2 * $(echo "$MODES" | tr ' ' '\n' | grep -vc auto) * ${one%%:*})) ${one#*:}"
    done
fi
for way in $MODES; do
    # The window is long enough to see that mappings end lazily.
    case $way in lazy) words=window_us=2000000;; *) words=;; esac
    mode "$edu" "$way" $words >/tmp/said 2>&1 || { bad "api $way" "$(cat /tmp/said)"; continue; }
    bind "$edu" portcullis_api || { bad "api $way" "not bound"; continue; }
    for name in streams lists sizes; do accepted $name "$edu" "$way"; done
    # `auto` does the same as `strict` with mappings that are never copied.
    if [ "$way" != auto ]; then
        before=$(counter "$edu" copies)
        accepted memory "$edu" "$way"
        accepted resource "$edu" "$way"
        [ "$(counter "$edu" copies)" = "$before" ] || bad "api $way" "shared memory or registers were copied"
        group peers "$edu" "$way"
    fi

    # Eight lists: each is ended by one wait, or all of them by one where they end lazily. A pool may give memory back meanwhile: then once more.
    # (Kicks of virtio's are for maps, too.)
    waits=$(waits)
    [ "$IOMMU" != virtio ] || waits=
    for try in 1 2 3; do
        before=$(counter "$edu" waits) hardware=- module=-
        counting $waits
        accepted waits "$edu" "$way"
        [ -z "$waits" ] || hardware=$(counted $waits)
        counted_all $waits
        [ "$before" = - ] || module=$(($(counter "$edu" waits) - before))
        few "$way:$hardware" && few "$way:$module" && break
    done
    echo "figure waits for the IOMMU in eight lists | IOMMU | $way: $hardware"
    echo "figure waits for the IOMMU in eight lists | module | $way: $module"
    few "$way:$hardware" && few "$way:$module" && ok "api $way waits for eight lists" || bad "api $way waits for eight lists" "$hardware, $module"

    group masks "$edu" "$way"
    case $way in linux-*) ;; *) says "$edu" "a mask of fff leaves no addresses" "$way";; esac
    case $way in linux-* | auto) ;; *)
        mode "$first" "$way" $words >/tmp/said 2>&1 || bad "api $way" "$(cat /tmp/said)"
        for device in "$first" $second; do bind "$device" portcullis_api; done
        misused "of another domain" "$edu" "$way"
        # Of the same domain, where there are two.
        misused "of the next" "$first" "$way"
        for device in $second "$first"; do unbind "$device"; done
        check "api $way group given back" put $P/unprotect "$first";;
    esac
    unbind "$edu"
    [ ! -d "$P/devices/$edu" ] || check "api $way given back" put $P/unprotect "$edu"
done
rmmod portcullis_api
if [ -d $P ]; then
    check "module removed" rmmod portcullis
    # The same card outside and inside: the rule takes one, and protects the ends of buffers even strictly.
    load portcullis devices=untrusted policy=strict
    load portcullis_edu
    for device in "$outside" "$edu"; do
        dmesg -c >/dev/null
        bind "$device" portcullis_edu
        taken=$([ -d "$P/devices/$device" ] && echo taken || echo "not taken")
        dmesg >"/tmp/log.$taken"
        [ "$device" = "$edu" ] || grep -q "$device: portcullis: protected: strict, and ends copied" "/tmp/log.$taken" || bad "outside" "not protected as outside"
        echo "$device $taken"
    done >/tmp/taken
    [ "$(cat /tmp/taken)" = "$outside taken
$edu not taken" ] && ok "what firmware marks as external is taken" || bad "what firmware marks as external is taken" "$(tr '\n' ' ' </tmp/taken)"
    grep -q "other data in the page of a buffer: nothing" "/tmp/log.taken" && ! grep -q "page of a buffer: REACHED" "/tmp/log.taken" &&
        ok "the one outside reaches no other data in a page" || bad "the one outside" "$(grep "page of a buffer" /tmp/log.taken)"
    unbind "$outside"; unbind "$edu"
    fails "lazy is refused outside" put $P/protect "$outside policy=lazy"
    dmesg | grep -q "$outside: portcullis: lazy is refused" && ok "that is told" || bad "that is told" "$(dmesg | tail -n 1)"
    rmmod portcullis_edu
    check "module removed at the end" rmmod portcullis
fi
echo end
