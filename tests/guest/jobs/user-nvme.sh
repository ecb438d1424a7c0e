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
    # Lines of the table: way, KiB, reads/s, us of half and of 99 %, us of map and unmap (half, mean), CPU time, the kernel's, calls, reads,
    # percent of `advance` in reads/s (half of the rounds, a quarter, three).
    grep -E '^(direct|ring|pool|auto|cache|advance) ' /tmp/said | while read -r name kib speed half most map mean cpu kernel calls reads part low high; do
        case $name in
        pool | cache | advance)
            if [ "$calls" = 0 ]; then ok "$way: $name of $kib KiB: no system call in $reads reads"; else bad "$way: $name of $kib KiB" "$calls system calls in $reads reads"; fi;;
        esac
        echo "figure us in map and unmap, copies included (half of the reads), $way | $kib KiB | $name: $map"
        echo "figure us in map and unmap, mean, $way | $kib KiB | $name: $mean"
        echo "figure reads per second, $way | $kib KiB | $name: $speed"
        echo "figure % of the reads per second of advance in the same round, $way | $kib KiB | $name: $part"
        echo "figure the same in a quarter of the rounds, $way | $kib KiB | $name: $low"
        echo "figure and in three, $way | $kib KiB | $name: $high"
        echo "figure us of a read (half), $way | $kib KiB | $name: $half"
        echo "figure us of a read (99 %), $way | $kib KiB | $name: $most"
        echo "figure us of CPU time, $way | $kib KiB | $name: $cpu"
        echo "figure system calls in $reads reads, $way | $kib KiB | $name: $calls"
    done
done
# A map and an unmap from C beside Rust's, in turn: by a pool, so that no system call hides a difference.
edu=$(dev 0a.0)
take "$edu"
for bytes in 64 4096 65536; do
    for round in 1 2 3; do
        rust=$(portcullis-user pairs "$edu" $bytes 2000) c=$(portcullis-calls pairs "$edu" $bytes 2000)
        echo "figure ns of a map and an unmap in a pool | $bytes bytes, round $round | Rust: $rust"
        echo "figure ns of a map and an unmap in a pool | $bytes bytes, round $round | C: $c"
        ok "$bytes bytes: C $c ns, Rust $rust ns"
    done
done
echo end
