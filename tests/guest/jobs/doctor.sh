# The command `doctor`: it names the IOMMU and the mode of each group as these are, and a parameter that this kernel ignores;
# and where nothing is wrong it says so.
drivers
device=$(dev 04.0)
number=$(basename "$(readlink "$PCI/devices/$device/iommu_group")")
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null

# look: all that it says, in one line each for people and for programs.
look() {
    portcullis doctor --seconds 0 >/tmp/text; state=$?
    tr -s '\n ' ' ' </tmp/text >/tmp/line
    portcullis doctor --seconds 0 --json | tr -d '\n ' >/tmp/json
}
told() { if grep -q -e "$2" "/tmp/$3"; then ok "$1"; else bad "$1" "$(tail -c 1500 "/tmp/$3")"; fi; }
not_told() { if grep -q -e "$2" /tmp/line; then bad "$1" "$(cat /tmp/line)"; else ok "$1"; fi; }

look
cat /tmp/text
case $IOMMU in
vtd) told "its name" "IOMMU: Intel VT-d, 1 unit (dmar0), addresses of 48 bits, pages of 4 KiB" line;;
amdvi) told "its name" "IOMMU: AMD-Vi, 1 unit (ivhd0), addresses of [0-9]* bits, pages of 4 KiB" line;;
virtio) told "its name" "IOMMU: virtio-iommu, 1 unit (0000:00:10.0), addresses of [0-9]* bits, pages of 4 KiB" line;;
esac
told "a virtual machine" "Kernel: Linux $(uname -r), in a virtual machine" line
told "swiotlb" "swiotlb: [0-9]* [KM]iB, in use\|swiotlb: none" line
case $IOMMU in
vtd) not_told "intel_iommu=on is read" "ignores the parameter intel_iommu=on";;
*) told "intel_iommu=on is ignored" "ignores the parameter intel_iommu=on" line;;
esac
not_told "nothing is refused yet" "did not let"
# QEMU's AMD-Vi is made without remapping of interrupts, and the kernel says so.
[ "$IOMMU" = amdvi ] && expected_code=1 || expected_code=0
[ $state = $expected_code ] && ok "no false alarm" || bad "no false alarm" "exit code $state: $(cat /tmp/line)"

for way in linux-strict linux-lazy linux-passthrough; do
    mode "$device" $way || { bad "$way" "the group's type does not change"; continue; }
    look
    told "$way" "\"number\":\"$number\",\"mode\":\"${way#linux-}\"" json
    told "$way of its disk" "\"name\":\"$device\".*\"group\":\"$number\"" json
    case $way in
    linux-passthrough)
        told "passthrough is a finding" "$device[^.]* under passthrough\|devices are under passthrough" line
        [ $state = 1 ] && ok "its exit code" || bad "its exit code" "$state";;
    *) not_told "$way is no finding" "under passthrough";;
    esac
done
echo end
