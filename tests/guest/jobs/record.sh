# The commands `record` and `watch`: what is recorded under load, that nothing is lost, and that tracing is left as it was found, also by a run that
# is killed.
load virtio_iommu
echo 0 >$PCI/drivers_autoprobe
device=$(dev 0b.0)
load portcullis_bench
R=/sys/module/portcullis_bench/parameters

# settings FILE: all that is set of tracing, event by event.
settings() {
    (cd $T && ls instances && head -n 100 tracing_on current_tracer trace_clock buffer_size_kb set_event trace_options saved_cmdlines_size &&
        find events -name enable -o -name filter | sort | xargs head -n 3) >"$1" 2>/dev/null
}
# as_found NAME: tracing is as it was found.
as_found() {
    settings /tmp/after
    if cmp -s /tmp/before /tmp/after; then ok "$1: tracing is as it was found"; else bad "$1: tracing is as it was found" "$(diff /tmp/before /tmp/after | tail -n 4 | tr '\n' ' ')"; fi
}
# The load, until /tmp/enough is there: a driver that maps and unmaps, or a disk that is read.
if [ -e $R/run ]; then
    grouped "$device" portcullis_bench; bind "$device" portcullis_bench
    # Some 100,000 events in each second.
    load_it() { echo "1 1 1500 skip" >$R/run; usleep 44000; }
else
    drivers
    device=$(dev 04.0)
    bind "$device" nvme; within 20 disk "$device"; node=/dev/$(disk "$device"); within 5 test -b "$node"
    load_it() { portcullis-guest read "$node" --threads 4 --operations 2000 --size 4096 >/dev/null; }
fi
working() { (while [ ! -e /tmp/enough ]; do load_it; done) & }
stop() { touch /tmp/enough; wait; rm /tmp/enough; }
recorded() { sed -n "s/$1/\\1/p" /tmp/told | tail -n 1 | tr -d ,; }

settings /tmp/before
[ -s /tmp/before ] && ok "tracing has $(wc -l </tmp/before) settings" || bad "settings" "none are there"
working
for round in 1 2; do
    file=/tmp/$round.trace.zst
    if portcullis record --seconds 5 -o $file >/tmp/told 2>&1; then ok "recorded"; else bad "recorded" "$(cat /tmp/told)"; fi
    tr '\n' ' ' </tmp/told >/tmp/line; mv /tmp/line /tmp/told; cat /tmp/told; echo
    grep -q "none lost" /tmp/told && ok "round $round: no event is lost" || bad "round $round: no event is lost" "$(cat /tmp/told)"
    echo "figure record, events per second | round $round | $IOMMU: $(recorded '.* s, \([0-9,]*\)\/s.*')"
    echo "figure record, its share of one CPU | round $round | $IOMMU: $(recorded '.*to record took \(.*\) of one.*')"
    echo "figure record, CPUs busy | round $round | $IOMMU: $(recorded '.*CPUs were \(.*\) busy.*')"
    echo "figure record, bytes of the file | round $round | $IOMMU: $(stat -c %s $file)"
done
as_found "recorded"
# A second run is refused, and one that is killed leaves what the next removes.
portcullis record --seconds 600 -o /tmp/killed.zst >/dev/null 2>&1 &
victim=$!
within 5 grep -q 1 $T/instances/portcullis/tracing_on
portcullis record --seconds 1 -o /tmp/second.zst >/tmp/told 2>&1 && bad "a second run is refused" "it recorded" || ok "a second run is refused: $(tail -n 1 /tmp/told)"
kill -9 $victim; wait $victim 2>/dev/null
[ -d $T/instances/portcullis ] && ok "a killed run leaves its instance" || bad "a killed run leaves its instance" "it is gone"
portcullis record --seconds 1 -o /tmp/next.zst >/tmp/told 2>&1 || bad "the next run" "$(cat /tmp/told)"
grep -q "was killed" /tmp/told && ok "the next run says so" || bad "the next run says so" "$(cat /tmp/told)"
as_found "killed"
# SIGTERM and Ctrl-C end it with what there is.
for signal in INT TERM; do
    portcullis record -o /tmp/$signal.zst >/tmp/told 2>&1 &
    victim=$!
    within 5 grep -q 1 $T/instances/portcullis/tracing_on; sleep 1
    # A shell's background has SIGINT ignored, which this program respects.
    [ $signal = INT ] && kill -TERM $victim || kill -$signal $victim
    wait $victim && ok "$signal ends it well" || bad "$signal ends it well" "$(cat /tmp/told)"
    [ -s /tmp/$signal.zst ] && ok "$signal: there is a recording" || bad "$signal: there is a recording" "$(cat /tmp/told)"
done
# A command's exit code, and a device that is asked for.
portcullis record -o /tmp/command.zst -- sh -c 'sleep 1; exit 7' >/tmp/told 2>&1; code=$?
[ $code = 7 ] && ok "a command's exit code" || bad "a command's exit code" "$code: $(cat /tmp/told)"
portcullis record --seconds 1 --device 00.0 -o /tmp/other.trace >/tmp/told 2>&1 || bad "another device" "$(cat /tmp/told)"
grep -q " dma_" /tmp/other.trace && bad "another device" "$(grep -m 1 ' dma_' /tmp/other.trace)" || ok "another device's mappings are not recorded"
portcullis record --seconds 1 --device 1f.9 -o /tmp/none.trace >/tmp/told 2>&1 && bad "no such device" "it recorded" || ok "no such device: $(tail -n 1 /tmp/told)"
portcullis record --seconds 1 --device "${device#0000:00:}" -o /tmp/one.trace >/tmp/told 2>&1
grep -q " dma_\| map: " /tmp/one.trace && ok "the device's are" || bad "the device's are" "$(cat /tmp/told)"
# What is private is gone at once, and the verdict is one command.
portcullis record --seconds 1 --anonymize -o /tmp/public.trace >/tmp/told 2>&1 || bad "anonymous" "$(cat /tmp/told)"
grep -q "$device" /tmp/public.trace && bad "anonymous" "it names the device" || ok "anonymous: no device is named"
portcullis record --seconds 2 --replay -o /tmp/verdict.zst >/tmp/told 2>&1 || bad "verdict" "$(cat /tmp/told)"
cat /tmp/told
grep -q "mapping" /tmp/told && ok "the verdict at once" || bad "the verdict at once" "$(cat /tmp/told)"
portcullis record --seconds 1 2>/tmp/told | portcullis replay - >/tmp/said 2>&1 && ok "record | replay -" || bad "record | replay -" "$(cat /tmp/told /tmp/said)"
timeout 60 portcullis watch --seconds 3 >/tmp/told 2>&1 || bad "watch" "$(cat /tmp/told)"
cat /tmp/told
grep -q "${device#0000:}\|iommu" /tmp/told && ok "watch names the device" || bad "watch names the device" "$(cat /tmp/told)"
stop
as_found "all"
# Where tracefs is not mounted.
umount $T
portcullis record --seconds 1 -o /tmp/private.zst >/tmp/told 2>&1 && ok "without a mount" || bad "without a mount" "$(cat /tmp/told)"
mount -t tracefs tracefs $T
as_found "without a mount"
echo end
