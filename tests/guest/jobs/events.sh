# What an I/O costs the IOMMU in steady state: calls of iommu_map and iommu_unmap, and waits for its hardware, for reads of a disk in
# each of $MODES. Beside it, reads per second.
drivers
load_ours
device=$(dev 04.0)
waits=$(waits)
reads=${READS:-1000}
for way in $MODES; do
    mode "$device" "$way" "$PARAMETERS" >/tmp/said 2>&1 || { bad "events $way" "$(cat /tmp/said)"; continue; }
    bind "$device" nvme
    within 20 disk "$device" || { bad "events $way" "no disk"; continue; }
    node=/dev/$(disk "$device"); within 5 test -b "$node"
    for size in 4096 16384 65536 131072; do
        # What a first use allocates is there afterwards: also for as many at once as there will be.
        portcullis-guest read "$node" --threads 8 --operations 200 --size $size >/dev/null
        row="$((size >> 10)) KiB"
        # Copies are to cost the IOMMU nothing once there are as many buffers as are needed at once. That is looked at three times: the tables
        # have the one in the middle, and one of them all. None may take more than one call for 100 reads. Some take a few: a pool grows where
        # more buffers are in use than ever in the last seconds, which are more where a driver maps each page of a read by itself.
        case $way in bounce) tries="1 2 3";; *) tries=1;; esac
        : >/tmp/calls
        for try in $tries; do
            counting iommu/map iommu/unmap $waits
            said=$(portcullis-guest read "$node" --threads 4 --operations $((reads / 4)) --size $size) || bad "events $way $size" "$said"
            maps=$(counted iommu/map) unmaps=$(counted iommu/unmap) invalidations=$(counted $waits)
            counted_all iommu/map iommu/unmap $waits
            echo "figure iommu_map for $reads reads | $row | $way: $maps"
            echo "figure iommu_unmap for $reads reads | $row | $way: $unmaps"
            echo "figure waits for the IOMMU in $reads reads | $row | $way: $invalidations"
            said=${said##*, }
            echo "figure reads per second, 4 threads | $row | $way: ${said%% *}"
            [ "$maps" != - ] || { bad "events $way $size" "nothing can be counted"; maps=0 unmaps=0; }
            echo "$((maps + unmaps))" >>/tmp/calls
        done
        most=$(sort -n /tmp/calls | tail -n 1)
        case $way in
        bounce)
            echo "figure calls of both for $reads reads, each of three times | $row | $way: $(tr '\n' ' ' </tmp/calls)"
            [ "$most" -le $((reads / 100)) ] && ok "events $way $size" || bad "events $way $size" "$most calls";;
        linux-passthrough | auto) ok "events $way $size";;
        *) [ "$most" -gt 0 ] && ok "events $way $size" || bad "events $way $size" "nothing was counted";;
        esac
    done
    unbind "$device"
    [ ! -d "$P/devices/$device" ] || check "events $way given back" put $P/unprotect "$device"
done
[ ! -d $P ] || check "module removed" rmmod portcullis
echo end
