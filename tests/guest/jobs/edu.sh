# What a hostile device reaches, in each of $MODES.
load virtio_iommu
load_ours
echo 0 >$PCI/drivers_autoprobe
device=$(dev 0a.0)
load portcullis_edu $EDU
grouped "$device" portcullis_edu

# expected WAY ATTEMPT OUTCOME: whether it is what the way promises. Strict and lazy protect whole pages, and lazy not at once.
expected() {
    case $3 in works | nothing | 0) [ "$1:$3" != linux-passthrough:nothing ]; return;; esac
    case $3:$1:$2 in
    REACHED:linux-passthrough:*) return 0;;
    REACHED:*strict:*"data in the page"* | REACHED:*lazy:*"data in the page"*) return 0;;
    REACHED:*lazy:*"few milliseconds after"*) return 0;;
    # Where it copies nothing, it is as strict.
    REACHED:auto:*"data in the page"*) return 0;;
    *:"last reached"*) return 0;;
    esac
    return 1
}
for way in $MODES; do
    mode "$device" "$way" >/tmp/said 2>&1 || { bad "edu $way" "$(cat /tmp/said)"; continue; }
    dmesg -c >/dev/null
    bind "$device" portcullis_edu
    dmesg | sed -n 's/.*edu: //p' >/tmp/edu
    grep -q '^end: 0' /tmp/edu || bad "edu $way" "$(tail -n 2 /tmp/edu | tr '\n' ' ')"
    while IFS= read -r line; do
        attempt=${line%: *}; outcome=${line##*: }
        case $attempt in end | misuse) continue;; esac
        expected "$way" "$attempt" "$outcome" && ok "edu $way $attempt" || bad "edu $way $attempt" "$outcome"
        echo "figure what the device reached | $attempt | $way: $outcome"
    done </tmp/edu
    unbind "$device"
    [ ! -d "$P/devices/$device" ] || check "edu $way given back" put $P/unprotect "$device"
done
rmmod portcullis_edu
[ ! -d $P ] || check "module removed" rmmod portcullis
echo end
