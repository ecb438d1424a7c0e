//! What formats that wrap another one have in common.

/// The methods of a [`Format`](portcullis::pgtable::Format) that are those of the format in its field `0`: all but `decode`.
macro_rules! of_the_inner_format {
    () => {
        fn name(&self) -> &'static str {
            self.0.name()
        }

        fn levels(&self) -> u32 {
            self.0.levels()
        }

        fn input_bits(&self) -> u32 {
            self.0.input_bits()
        }

        fn last_phys(&self) -> portcullis::addr::PhysAddr {
            self.0.last_phys()
        }

        fn leaf_sizes(&self) -> &'static [portcullis::pgtable::LeafSize] {
            self.0.leaf_sizes()
        }

        fn leaf(
            &self,
            page: portcullis::addr::PhysAddr,
            size: portcullis::pgtable::LeafSize,
            attributes: portcullis::pgtable::Attributes,
        ) -> u64 {
            self.0.leaf(page, size, attributes)
        }

        fn stride(&self, size: portcullis::pgtable::LeafSize) -> u64 {
            self.0.stride(size)
        }

        fn table(&self, table: portcullis::addr::PhysAddr, level: u32) -> u64 {
            self.0.table(table, level)
        }

        fn page(&self, entry: u64, level: u32) -> portcullis::addr::PhysAddr {
            self.0.page(entry, level)
        }

        fn attributes(&self, entry: u64, level: u32) -> portcullis::pgtable::Attributes {
            self.0.attributes(entry, level)
        }
    };
}
