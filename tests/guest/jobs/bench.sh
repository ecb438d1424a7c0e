# What maps and unmaps cost, in each of $MODES in turn, $ROUNDS times: tests/guest/bench. $CASES are lines for it, with THREADS and PAGES first.
# With $PER_GB, microseconds for so many pages that they are a GB, in place of nanoseconds for one mapping.
load virtio_iommu
load_ours
echo 0 >$PCI/drivers_autoprobe
device=$(dev 0b.0)
load portcullis_bench
grouped "$device" portcullis_bench
R=/sys/module/portcullis_bench/parameters
settle
round=0
while [ $round -lt "${ROUNDS:-3}" ]; do
    round=$((round + 1))
    for way in $MODES; do
        mode "$device" "$way" "$PARAMETERS" >/tmp/said 2>&1 || { bad "bench $way" "$(cat /tmp/said)"; continue; }
        bind "$device" portcullis_bench
        echo "$CASES" | while read -r threads pages words; do
            [ -n "$threads" ] || continue
            loops=${LOOPS:-2000}
            echo "$threads $pages $((loops / 4)) $words" >$R/run
            if echo "$threads $pages $loops $words" >$R/run; then
                # map M unmap U pair P least L each E
                read -r _ map _ unmap _ pair _ _ _ each <$R/result
                row="$threads threads, $pages pages${words:+, $words}"
                case $words${PER_GB:+ per GB} in
                *"per GB")
                    gb=$((262144 / pages)) row="$((pages * 4)) KiB${words#split}"
                    echo "figure us in map per GB | $row | $way: $((map * gb / 1000))"; echo "figure us in unmap per GB | $row | $way: $((unmap * gb / 1000))"
                    echo "figure us in map and unmap per GB | $row | $way: $(((map + unmap) * gb / 1000))";;
                *split*) echo "figure ns in map | $row | $way: $map"; echo "figure ns in unmap | $row | $way: $unmap"
                         echo "figure ns in map and unmap | $row | $way: $((map + unmap))"
                         echo "figure ns for each mapping of all threads together | $row | $way: $each";;
                *) echo "figure ns (instructions where they are the clock) in map and unmap | $row | $way: $pair";;
                esac
                ok "bench $way $threads $pages $words"
            else
                bad "bench $way $threads $pages $words" "$(dmesg | tail -n 1)"
            fi
        done
        unbind "$device"
        [ ! -d "$P/devices/$device" ] || put $P/unprotect "$device" || bad "bench $way given back" "$(cat /tmp/put)"
    done
done
rmmod portcullis_bench
[ ! -d $P ] || check "module removed" rmmod portcullis
echo end
