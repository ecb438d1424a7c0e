# A process reads a disk of QEMU's by VFIO, by each way to map its buffers: each byte is compared, and what a pool, a cache of mappings and
# mappings in advance do makes no system call.
load_vfio
disk=$(dev 04.0)
take "$disk"
allow_interrupts
ways=$(vfio_ways "$disk")
case $ways in *iommufd*) ;; *) echo "skip iommufd: this kernel has none (--guest-kernel takes one that has)";; esac
# figures BY: lines of the example's table: way, KiB, reads/s, us of half and of 99 %, us of map and unmap (half, mean), CPU time, the kernel's, calls,
# reads, percent of `advance` in reads/s (half of the rounds, a quarter, three), reads/s of the fastest tenth of the rounds, and in percent of its. A second line of `advance` shows what noise is left.
figures() {
    grep -E '^(direct|ring|pool|mempool|auto|cache|advance) ' | while read -r name kib speed half most map mean cpu kernel calls reads part low high fastest fast; do
        case $name in
        pool | mempool | cache | advance)
            if [ "$calls" = 0 ]; then ok "$1: $name of $kib KiB: no system call in $reads reads"; else bad "$1: $name of $kib KiB" "$calls system calls in $reads reads"; fi;;
        esac
        [ "$name $kib" != "$before" ] || name="$name again"
        before="$name $kib"
        echo "figure us in map and unmap, copies included (half of the reads), $1 | $kib KiB | $name: $map"
        echo "figure us in map and unmap, mean, $1 | $kib KiB | $name: $mean"
        echo "figure reads per second, $1 | $kib KiB | $name: $speed"
        echo "figure % of the reads per second of advance in the same round: a quarter of the rounds, half, three quarters, $1 | $kib KiB | $name: $low / $part / $high"
        echo "figure reads per second of the fastest tenth of the rounds, and % of advance's, $1 | $kib KiB | $name: $fastest / $fast"
        echo "figure us of a read (half), $1 | $kib KiB | $name: $half"
        echo "figure us of a read (99 %), $1 | $kib KiB | $name: $most"
        echo "figure us of CPU time, $1 | $kib KiB | $name: $cpu"
        echo "figure system calls in $reads reads, $1 | $kib KiB | $name: $calls"
    done
}
for way in $ways; do
    portcullis-user pages $way "$disk" || bad "$way pages" "it failed"
    by=; [ $way = iommufd ] || by=--type1
    # shellcheck disable=SC2086
    if nvme --pci "$disk" $by --overwrite --ways direct,ring,pool,mempool,auto,cache,advance,advance $ARGUMENTS >/tmp/said 2>&1; then
        ok "$way: each read has what was written"
    else
        bad "$way" "$(tail -n 2 /tmp/said | tr '\n' ' ')"
    fi
    cat /tmp/said
    figures $way </tmp/said
done
# The same reads in C, by VFIO's type 1 alone, and ours, in turn.
for kib in 4 128; do
    for turn in 1 2 3 4 5; do
        nvme --pci "$disk" --type1 --kib $kib --rounds 9 --ways direct,advance >/tmp/said 2>&1 || bad "turn $turn" "$(tail -n 1 /tmp/said)"
        nvme-c "$disk" $kib 32 400 9 >/tmp/said.c 2>&1 || bad "nvme-c, turn $turn" "$(tail -n 1 /tmp/said.c)"
        grep -E '^(direct|advance|c-direct|c-advance) ' /tmp/said /tmp/said.c | sed 's/^[^:]*://' | while read -r name size speed half most map mean cpu kernel calls reads part low high fastest fast; do
            case $name in c-*) map=$half fastest=$most;; esac
            echo "figure reads per second (half of the rounds), beside C | $size KiB, turn $turn | $name: $speed"
            echo "figure reads per second (the fastest tenth), beside C | $size KiB, turn $turn | $name: $fastest"
            echo "figure us in map and unmap (half of the reads), beside C | $size KiB, turn $turn | $name: $map"
        done
    done
done
ok "C and Rust have read in turn"
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
