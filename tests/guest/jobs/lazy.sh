# Lazy modes: waits for the hardware in 100,000 unmaps, and how long after its unmap a device still reaches a buffer.
load virtio_iommu
load_ours
echo 0 >$PCI/drivers_autoprobe
device=$(dev 0b.0) hostile=$(dev 0a.0)
load portcullis_bench
load portcullis_edu window=1
grouped "$device" portcullis_bench
grouped "$hostile" portcullis_edu
R=/sys/module/portcullis_bench/parameters
waits=$(waits)
for way in $MODES; do
    mode "$device" "$way" >/tmp/said 2>&1 || { bad "lazy $way" "$(cat /tmp/said)"; continue; }
    bind "$device" portcullis_bench
    echo "1 1 1000" >$R/run
    counting iommu/unmap $waits
    echo "1 1 100000" >$R/run || bad "lazy $way" "the bench failed"
    unmaps=$(counted iommu/unmap) count=$(counted $waits)
    counted_all iommu/unmap $waits
    echo "figure lazy | calls of iommu_unmap in 100,000 unmaps | $way: $unmaps"
    echo "figure lazy | waits for the hardware in 100,000 unmaps | $way: $count"
    ok "lazy $way"
    unbind "$device"
    [ ! -d "$P/devices/$device" ] || check "$way given back" put $P/unprotect "$device"
    mode "$hostile" "$way" >/tmp/said 2>&1 || { bad "window $way" "$(cat /tmp/said)"; continue; }
    dmesg -c >/dev/null
    bind "$hostile" portcullis_edu
    echo "figure lazy | last reached, us after the unmap | $way: $(dmesg | sed -n 's/.*edu: last reached, us after the unmap: //p')"
    unbind "$hostile"
    [ ! -d "$P/devices/$hostile" ] || check "$way given back" put $P/unprotect "$hostile"
done
rmmod portcullis_bench; rmmod portcullis_edu
[ ! -d $P ] || check "module removed" rmmod portcullis
echo end
