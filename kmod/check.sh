#!/bin/sh
# What can be said of the module without booting: `make check` calls this, with CORE, BUILD, KDIR, CARGO, and LINKER, which links programs and compiles C (CC).
set -eu
cd "$(dirname "$0")"

echo "== the C side: no warning with W=1, and none of sparse where it is"
sparse=""
if command -v sparse >/dev/null; then sparse="C=2 CHECK=sparse"; else echo "   (sparse is not there)"; fi
# (W=1 has a script of the kernel's, in Perl or Python, read kernel-doc comments, too. There are none.)
rm -f src/*.o
log=$($BUILD W=1 $sparse cmd_checkdoc=: modules 2>&1) || { echo "$log"; exit 1; }
# A word of the kernel's own headers, or of a compiler that is a little newer, is not ours.
if echo "$log" | grep -E "warning|error|objtool" | grep -vF "$KDIR/" | grep -vE "^/usr|the compiler differs|Skipping BTF"; then exit 1; fi

echo "== layouts: portcullis.h and ffi.rs"
(cd rust && mkdir -p target/layout && CARGO_MANIFEST_DIR=$PWD CARGO_TARGET_TMPDIR=$PWD/target/layout \
	rustc --edition 2024 -C linker="$LINKER" --test tests/layout.rs -o target/layout/layout && target/layout/layout --quiet)

echo "== the core asks for nothing but the shim's services and the kernel's memcpy and thunks"
others=$(nm -u "$CORE" | awk '{print $2}' |
	grep -vE '^(pcs_[a-z_]+|memcpy|memmove|memset|memcmp|bcmp|__x86_return_thunk|__x86_indirect_thunk_[a-z0-9]+)$' || true)
[ -z "$others" ] || { echo "$others"; exit 1; }

echo "== no registers that the kernel does not save"
if objdump -d --no-show-raw-insn "$CORE" | grep -m 5 -E '%(xmm|ymm|zmm|mm|st)[0-9(]'; then exit 1; fi

echo "== no frame that is too large for a kernel's stack"
if [ -e ../tests/stack ]; then
	"$CARGO" run --quiet --locked --release --manifest-path ../Cargo.toml --package portcullis-stack --bin stack-frames -- "$CORE"
else
	echo "   (the program that reads them is not there: it comes with a clone, not with DKMS)"
fi

echo "== relocations that the loader knows"
kinds=$(readelf -rW "$CORE" | awk '/R_X86_64/{print $3}' | sort -u | grep -vE '^R_X86_64_(64|32|32S|PC32|PLT32|PC64|NONE)$' || true)
[ -z "$kinds" ] || { echo "$kinds"; exit 1; }
echo "== all well"
