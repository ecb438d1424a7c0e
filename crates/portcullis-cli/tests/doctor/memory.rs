use super::*;
use crate::doctor::tree::Tree;

#[test]
fn addresses_are_counted_where_the_slab_is_shown() {
    assert_eq!(addresses("slabinfo - version: 2.1\niommu_iova   120034 120064  64\n"), Some(120_034));
    for text in ["", "iommu_iova", "iommu_iova x", "iommu_iova -1 2", "iommu_iova 99999999999999999999"] {
        assert_eq!(addresses(text), None, "{text}");
    }
}

#[test]
fn memory_is_read_from_what_the_kernel_shows() {
    let folder = tempfile::tempdir().unwrap();
    let file = |path: &str, text: &str| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    file(
        "proc/meminfo",
        "MemTotal: 1 kB\nHugePages_Total:      16\nHugePages_Free:        7\nHugepagesize:       2048 kB\n",
    );
    file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    file("proc/self/limits", "Max locked memory         unlimited            unlimited            bytes\n");
    let tree = Tree::new(folder.path()).unwrap();
    let pages = HugePages::read(&tree.host());
    assert_eq!((pages.size_kib, pages.reserved, pages.free), (Some(2048), Some(16), Some(7)));
    assert_eq!((pages.transparent.as_deref(), Limits::read(&tree.host()).memlock), (Some("madvise"), None));
    file("proc/self/limits", "Max locked memory         8388608              8388608              bytes\n");
    file("sys/kernel/mm/transparent_hugepage/enabled", "odd ]always[\n");
    file("proc/meminfo", "HugePages_Total:\nHugepagesize: x kB\n");
    let pages = HugePages::read(&tree.host());
    assert_eq!((pages.size_kib, pages.reserved, pages.transparent), (None, None, None));
    assert_eq!(Limits::read(&tree.host()).memlock, Some(8 << 20));
}

#[test]
fn two_looks_are_beside_each_other_by_name() {
    let both = grown(&[("a", 1), ("b", 2)], &[("b", 5), ("c", 7)]);
    let told: Vec<_> = both.iter().map(|counter| (counter.name, counter.first, counter.second)).collect();
    assert_eq!(told, [("a", 1, None), ("b", 2, Some(5))]);
}

#[test]
fn an_empty_folder_is_no_swiotlb_and_none_is_not_known() {
    let folder = tempfile::tempdir().unwrap();
    let tree = Tree::new(folder.path()).unwrap();
    assert_eq!(Swiotlb::read(&tree.host()).slots, None);
    let debug = folder.path().join("sys/kernel/debug/swiotlb");
    std::fs::create_dir_all(&debug).unwrap();
    assert_eq!(Swiotlb::read(&tree.host()).slots, Some(0));
    std::fs::write(debug.join("io_tlb_nslabs"), "32768\n").unwrap();
    assert_eq!(Swiotlb::read(&tree.host()).slots, Some(32_768));
    std::fs::write(debug.join("io_tlb_nslabs"), "x\n").unwrap();
    assert_eq!(Swiotlb::read(&tree.host()).slots, None);
}
