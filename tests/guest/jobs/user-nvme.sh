# A process reads a disk of QEMU's by VFIO, by each way to map its buffers: each byte is compared, and what a pool, a cache of mappings and
# mappings in advance do makes no system call.
load_vfio
disk=$(dev 04.0)
take "$disk"
allow_interrupts
ways=$(vfio_ways "$disk")
case $ways in *iommufd*) ;; *) echo "skip iommufd: this kernel has none (--guest-kernel takes one that has)";; esac
for way in $ways; do
    portcullis-user pages $way "$disk" || bad "$way pages" "it failed"
    by=; [ $way = iommufd ] || by=--type1
    # shellcheck disable=SC2086
    if nvme --pci "$disk" $by --overwrite $ARGUMENTS >/tmp/said 2>&1; then
        ok "$way: each read has what was written"
    else
        bad "$way" "$(tail -n 2 /tmp/said | tr '\n' ' ')"
    fi
    cat /tmp/said
    # Lines of the table: way, KiB, reads/s, us of half and of 99 %, us of map and unmap (half, mean), CPU time, the kernel's, calls, reads.
    grep -E '^(direct|ring|pool|auto|cache|advance) ' /tmp/said | while read -r name kib speed half most map mean cpu kernel calls reads; do
        case $name in
        pool | cache | advance)
            if [ "$calls" = 0 ]; then ok "$way: $name of $kib KiB: no system call in $reads reads"; else bad "$way: $name of $kib KiB" "$calls system calls in $reads reads"; fi;;
        esac
        echo "figure us in map and unmap, copies included (half of the reads), $way | $kib KiB | $name: $map"
        echo "figure us in map and unmap, mean, $way | $kib KiB | $name: $mean"
        echo "figure reads per second, $way | $kib KiB | $name: $speed"
        echo "figure us of a read (half), $way | $kib KiB | $name: $half"
        echo "figure us of a read (99 %), $way | $kib KiB | $name: $most"
        echo "figure us of CPU time, $way | $kib KiB | $name: $cpu"
        echo "figure system calls in $reads reads, $way | $kib KiB | $name: $calls"
    done
done
echo end
