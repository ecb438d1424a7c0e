# What the jobs share. A job prints lines that the host reads:
#   ok NAME               a check that held
#   not ok NAME: WHY      one that did not
#   skip NAME: WHY        one that this kernel or machine has no means for
#   figure TABLE | ROW | COLUMN: VALUE    something measured
#   host: COMMAND         the host gives this to QEMU's monitor
#   expected N TEXT       the job provokes N complaints of the kernel with this text, no less and no more
#   end                   the job came to its end
# All else is printed where a job fails.

P=/sys/kernel/portcullis
T=/sys/kernel/tracing
PCI=/sys/bus/pci

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }

# check NAME COMMAND..: holds if the command succeeds.
check() {
    local what=$1; shift
    if "$@" >/tmp/said 2>&1; then echo "ok $what: $(tail -n 1 /tmp/said)"; else echo "not ok $what: $(tail -n 4 /tmp/said | tr '\n' ' ')"; fi
}

# fails NAME COMMAND..: holds if the command fails.
fails() {
    local what=$1; shift
    if "$@" >/tmp/said 2>&1; then bad "$what" "it succeeded"; else ok "$what"; fi
}

put() { echo "$2" 2>/tmp/put >"$1" || { cat /tmp/put; return 1; }; }

# Loads a driver and what it needs, unless the kernel has it built in; ours below /mods/own have no names of the kernel's.
load() {
    local module=$1 file named; shift
    [ -f "/mods/$module.list" ] || return 0
    while read -r file; do
        named=$(echo "${file%.ko}" | tr - _)
        [ -d "/sys/module/$named" ] && continue
        case $file in
        "$module.ko") insmod "/mods/$file" "$@" || return 1;;
        # Else a disk is not below its device.
        nvme_core.ko) insmod "/mods/$file" multipath=0 || return 1;;
        *) insmod "/mods/$file" || return 1;;
        esac
    done <"/mods/$module.list"
}

dev() { echo "0000:00:$1"; }

# within SECONDS COMMAND..: waits until the command succeeds.
within() {
    local tries=$(($1 * 5)); shift
    while ! "$@" >/dev/null 2>&1; do
        tries=$((tries - 1)); [ $tries -gt 0 ] || return 1
        usleep 200000
    done
}

# below CLASS DEVICE: the first of a class that is behind a PCI device.
below() {
    local found
    for found in /sys/class/"$1"/*; do
        case $(readlink -f "$found") in */"$2"/*) basename "$found"; return 0;; esac
    done
    return 1
}
disk() { below block "$1"; }
card() { below net "$1"; }

driver_of() { basename "$(readlink "$PCI/devices/$1/driver")" 2>/dev/null; }

unbind() { [ ! -e "$PCI/devices/$1/driver" ] || echo "$1" >"$PCI/devices/$1/driver/unbind"; }
bind() { put "$PCI/drivers/$2/bind" "$1"; }

# Behind virtio's IOMMU a device joins its group when it is first bound.
grouped() { [ -e "$PCI/devices/$1/iommu_group" ] || { bind "$1" "$2"; unbind "$1"; }; }

group_type() { cat "$PCI/devices/$1/iommu_group/type" 2>/dev/null || echo none; }

# mode DEVICE MODE: which way it is protected from now on. It has no driver. Linux's modes, or a policy of ours.
mode() {
    local wanted
    case $2 in
    linux-passthrough) wanted=identity;;
    linux-lazy) wanted=DMA-FQ;;
    linux-strict) wanted=DMA;;
    *) put $P/protect "$1 policy=$2 $3"; return;;
    esac
    [ ! -e "$P/devices/$1" ] || put $P/unprotect "$1" || return 1
    [ "$(group_type "$1")" = $wanted ] || put "$PCI/devices/$1/iommu_group/type" $wanted
}

counter() { cat "$P/devices/$1/$2" 2>/dev/null || echo -; }

# Loads the module, where $MODES has a policy of ours.
load_ours() {
    local one
    for one in $MODES; do
        case $one in linux-*) continue;; esac
        [ -d $P ] || load portcullis "$@" || { bad "module loaded" "insmod failed"; return 1; }
        return 0
    done
}

# Counts what the kernel's tracepoints and functions see, without an end to the number: `counting EVENT..`, later `counted EVENT`.
# An event is `group/name`, or a function that a probe finds.
counting() {
    local event
    for event in "$@"; do
        case $event in
        */*) ;;
        *) echo "p:seen/$event $event" >>$T/kprobe_events 2>/dev/null || continue; event=seen/$event;;
        esac
        # Each trigger starts at 0.
        [ -e "$T/events/$event/trigger" ] && echo 'hist:keys=common_type' >"$T/events/$event/trigger"
    done
}
counted() {
    local event hits
    case $1 in */*) event=$1;; *) event=seen/$1;; esac
    [ -e "$T/events/$event/hist" ] || { echo -; return; }
    hits=$(sed -n 's/^ *Hits: *//p' "$T/events/$event/hist"); echo "${hits:-0}"
}
counted_all() {
    local event
    for event in "$@"; do
        case $event in */*) ;; *) event=seen/$event;; esac
        [ -e "$T/events/$event/trigger" ] && echo '!hist:keys=common_type' >"$T/events/$event/trigger"
    done
    echo >$T/kprobe_events 2>/dev/null
}

# Waits until what the kernel does in the background after its boot is done (keys, tests of ciphers): else it is counted, too. Where the
# clock counts instructions, a sleep takes no time.
settle() { sleep "${SETTLE:-5}"; }

# What is called, or traced, where the kernel waits for the IOMMU's hardware.
waits() {
    case $IOMMU in
    vtd) echo intel_iommu/qi_submit;;
    # No other device of virtio is in use where this is counted.
    virtio) echo virtqueue_kick;;
    amdvi) echo iommu_completion_wait;;
    esac
}

# The drivers, and the devices that they drive, as the host places them.
DISKS="nvme:04.0 virtio_blk:08.0 ahci:1f.2 usb:09.0"
CARDS="e1000e:05.0 igb:06.0 virtio_net:07.0"
pci_driver() {
    case $1 in virtio_*) echo virtio-pci;; usb) echo xhci_hcd;; *) echo "$1";; esac
}
drivers() {
    load virtio_iommu
    echo 0 >$PCI/drivers_autoprobe
    load virtio_pci
    for module in nvme virtio_blk ahci sd_mod xhci_pci usb_storage uas e1000e igb virtio_net; do
        load $module || bad "driver $module" "it could not be loaded"
    done
    # What the kernel has built in has taken its devices already.
    for entry in $DISKS $CARDS; do
        unbind "$(dev "${entry##*:}")"; grouped "$(dev "${entry##*:}")" "$(pci_driver "${entry%%:*}")"
    done
}
# Where a driver's interface lies: QEMU's user network has a net of its own for each card.
net_of() { case $1 in e1000e) echo 10.0.5;; igb) echo 10.0.6;; virtio_net) echo 10.0.7;; esac; }

# QEMU's AHCI behind an IOMMU fails, and may crash, where the list of a command crosses a page: eight entries never do. (Linux 6.12 has a
# lockdep report of its own where a disk is told by its `max_sectors_kb`.)
largest() { [ "$1" != ahci ] || echo "--largest 16384"; }

# What is tried with a disk: use_disk NAME DEVICE.
use_disk() {
    local node
    within 20 disk "$2" || { echo "no disk"; return 1; }
    node=/dev/$(disk "$2")
    within 5 test -b "$node" || { echo "no $node"; return 1; }
    # shellcheck disable=SC2046
    portcullis-guest blocks "$node" --threads 4 --operations "${OPERATIONS:-40}" --seed "$RANDOM_SEED" $(largest "$1")
}
# What is tried with the disk of ahci besides: reads and writes of up to 1 MiB, with lists as long as it takes. One command at a time has the
# first table, whose list ends with its page. A read of 1 MiB must take two commands at most, or the lists were not long.
use_large() {
    local name node before after
    name=$(disk "$1") node=/dev/$(disk "$1")
    put "/sys/block/$name/device/queue_depth" 1 || return 1
    before=$(awk '{print $1}' "/sys/block/$name/stat")
    portcullis-guest read "$node" --threads 1 --operations 20 --size 1048576 >/dev/null || return 1
    after=$(awk '{print $1}' "/sys/block/$name/stat")
    portcullis-guest blocks "$node" --threads 1 --operations 120 --seed "$RANDOM_SEED" || return 1
    echo "$((after - before)) commands for 20 reads of 1 MiB"
    [ $((after - before)) -le 40 ]
}
# alone COMMAND..: waits until no other such command runs, then runs it.
alone() {
    local state
    until mkdir /tmp/alone 2>/dev/null; do usleep 20000; done
    "$@"; state=$?
    rmdir /tmp/alone
    return $state
}
# Takes the second CPU away, or gives it back: cpu1 0|1.
cpu1() { alone put /sys/devices/system/cpu/cpu1/online "$1"; }

# up NAME INTERFACE. A virtio_net of Linux 6.12 that comes up while a CPU leaves sends without NAPI from then on. It tells the packets of
# such a ring by a bit of their addresses, and leaves the bit there when the driver goes: it then counts down two bytes behind a packet's
# count of users (`refcount_t: underflow`, where these are 0). So it does without our module, too: here no CPU leaves meanwhile.
up() {
    case $1 in
    virtio_net) alone ip link set "$2" up;;
    *) ip link set "$2" up;;
    esac
}
# use_card NAME DEVICE. QEMU's virtio-iommu may translate an access that begins at the last byte of a page by the mapping of the page behind it, where
# there is one: it looks up the bytes from `addr` to `addr + 1`, both included (`virtio_iommu_translate`, QEMU 10.0). A card that sends a buffer
# whose first page has one byte of it sends a wrong byte, one of these in some 20 MiB, in Linux's modes without our module, too. Behind this
# IOMMU one wrong byte is tried again, twice.
use_card() {
    local at face state said again
    within 10 card "$2" || { echo "no card"; return 1; }
    at=$(net_of "$1"); face=$(card "$2")
    up "$1" "$face" && ip addr replace "$at.15/24" dev "$face" || return 1
    for again in 1 2 -; do
        said=$(portcullis-guest echo "$at.2:$ECHO_PORT" --mib "${MIB:-1}" --seed "$RANDOM_SEED"); state=$?
        case $state:$IOMMU:$again:$said in
        0:*|*:-:*) break;;
        *:virtio:*:"WRONG BYTES from "*": 1 byte in 1 of "*) echo "QEMU's wrong byte ($said); again:";;
        *) break;;
        esac
    done
    echo "$said"
    ip link set "$face" down; ip addr flush dev "$face"
    return $state
}

# VFIO, for the jobs of processes that drive devices.
load_vfio() {
    load virtio_iommu
    echo 0 >$PCI/drivers_autoprobe
    load vfio_iommu_type1; load vfio_pci
    [ -e /dev/vfio/vfio ] || bad "VFIO" "there is no /dev/vfio/vfio: $(ls /mods | tr '\n' ' ')"
}
# take DEVICE: gives it to VFIO.
take() {
    echo vfio-pci >"$PCI/devices/$1/driver_override"; unbind "$1"; echo "$1" >$PCI/drivers_probe
    [ "$(driver_of "$1")" = vfio-pci ] || bad "take $1" "it has $(driver_of "$1")"
}
# virtio's IOMMU has no remapping of interrupts on x86, and QEMU's AMD-Vi is made without it (`machine.rs`).
allow_interrupts() {
    [ "$IOMMU" != vtd ] || return 0
    local parameters
    for parameters in /sys/module/vfio_iommu_type1/parameters /sys/module/iommufd/parameters; do
        [ ! -e $parameters ] || put $parameters/allow_unsafe_interrupts Y
    done
}
# The interfaces of VFIO that the kernel has for a device.
vfio_ways() {
    if [ -e /dev/iommu ] && [ -e "$PCI/devices/$1/vfio-dev" ] && [ -d /dev/vfio/devices ]; then echo type1 iommufd; else echo type1; fi
}
