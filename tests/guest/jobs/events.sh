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
        # Copies are to cost the IOMMU nothing: each of three times is looked at, and the tables have the one in the middle.
        case $way in bounce) tries="1 2 3";; *) tries=1;; esac
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
            case $way:$maps:$unmaps in
            bounce:0:0) ok "events $way $size";;
            bounce:*) echo "in try $try $maps maps, $unmaps unmaps, $invalidations waits, pool $(counter "$device" pool_bytes)"; bad "events $way $size" "$maps maps, $unmaps unmaps, $invalidations waits";;
            *:-:* | *:0:0) case $way in linux-passthrough | auto) ok "events $way $size";; *) bad "events $way $size" "nothing was counted";; esac;;
            *) ok "events $way $size";;
            esac
        done
    done
    unbind "$device"
    [ ! -d "$P/devices/$device" ] || check "events $way given back" put $P/unprotect "$device"
done
[ ! -d $P ] || check "module removed" rmmod portcullis
echo end
