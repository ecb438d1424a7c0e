# A process drives devices by itself: `portcullis-user` maps its memory for QEMU's edu by VFIO, over type 1, and over iommufd where the
# kernel has it.
load_vfio
edu=$(dev 0a.0); disk=$(dev 04.0); card=$(dev 05.0); virtio=$(dev 08.0)
# What QEMU has in its port, and calls so.
hot=$(basename "$(ls -d $PCI/devices/$(dev 0c.0)/0000:??:??.? | head -n 1)"); id=hot
type1=/sys/module/vfio_iommu_type1/parameters

# says NAME TEXT COMMAND..: holds if the command fails with such a text.
says() {
    local what=$1 text=$2; shift 2
    if "$@" >/tmp/said 2>&1; then bad "$what" "it succeeded"; return; fi
    grep -q "$text" /tmp/said && ok "$what: $(tail -n 1 /tmp/said)" || bad "$what" "$(cat /tmp/said)"
}
# tries WAY COMMAND..: all of a part, whose lines are this job's.
tries() {
    local way=$1; shift
    portcullis-user "$@" >/tmp/said 2>&1 || bad "$way $1" "it failed: $(tail -n 2 /tmp/said | tr '\n' ' ')"
    sed "s/^ok /ok $way: /; s/^not ok /not ok $way: /" /tmp/said
}

says "a device that is not there" "no PCI device" portcullis-user open 0000:00:1e.7
says "a device without VFIO" driver_override portcullis-user open "$edu"
take "$edu"; take "$disk"; take "$card"; take "$virtio"; take "$hot"
if [ "$IOMMU" != vtd ]; then
    says "interrupts that are not checked" allow_unsafe_interrupts=1 portcullis-user open "$edu"
fi
allow_interrupts
ways=$(vfio_ways "$edu")
case $ways in *iommufd*) ;; *) echo "skip iommufd: this kernel has none (--guest-kernel takes one that has)";; esac
for way in $ways; do
    tries $way maps $way "$edu" "$disk"
    tries $way ends $way "$edu"
    tries $way locked $way "$edu"
    tries $way interrupts $way "$edu" "$card"
    tries $way virtio $way "$virtio"
    # Its lines are for the host, at once.
    portcullis-user plugs $way "$edu" "$hot" $id next-$way || bad "$way plugs" "it failed"
    id=next-$way
done
# On huge pages: set aside, transparent, and where there are none.
thp=/sys/kernel/mm/transparent_hugepage/enabled
put /proc/sys/vm/nr_hugepages 24
tries "${ways##* }" huge "${ways##* }" "$edu" set
tries "${ways##* }" ends "${ways##* }" "$edu"
put /proc/sys/vm/nr_hugepages 0
if [ -e $thp ]; then
    put $thp madvise
    tries "${ways##* }" huge "${ways##* }" "$edu" transparent
    put $thp never
fi
tries "${ways##* }" huge "${ways##* }" "$edu" small
# The same devices from C, by the best way that the kernel has.
portcullis-calls "$edu" "$disk" >/tmp/said 2>&1 || bad "the library for C" "it failed: $(tail -n 2 /tmp/said | tr '\n' ' ')"
cat /tmp/said
edu "$edu" 3 >/tmp/said 2>&1 && ok "edu.rs: $(cat /tmp/said)" || bad edu.rs "$(cat /tmp/said)"
edu-c "$edu" 3 >/tmp/said 2>&1 && ok "edu.c: $(cat /tmp/said)" || bad edu.c "$(cat /tmp/said)"
edu-ring "$edu" >/tmp/said 2>&1 && ok "edu.cpp: $(cat /tmp/said)" || bad edu.cpp "$(cat /tmp/said)"
was=$(cat $type1/dma_entry_limit)
put $type1/dma_entry_limit 100
tries type1 entries "$edu" 100
put $type1/dma_entry_limit "$was"
echo end
