//! For each variant of an error its whole sentence, once.

/// A test for each error. A variant that has no sentence here does not compile: so this stands in the error's own crate.
macro_rules! sentences {
    ($($test:ident: $type:ident {
        $($variant:ident $({ $($field:tt)* })? $(($($inner:tt)*))? => $sentence:expr;)*
    })*) => {$(
        #[test]
        fn $test() {
            let _each_has_one = |error: $type| match error { $($type::$variant { .. } => {})* };
            for (error, sentence) in
                [$(($type::$variant $({ $($field)* })? $(($($inner)*))?, $sentence)),*]
            {
                assert_eq!(alloc::string::ToString::to_string(&error), sentence);
            }
        }
    )*};
}
pub(crate) use sentences;
