use super::*;

#[test]
fn every_configuration_is_kept_as_it_is() {
    let kept = AtomicConfig::new(OpsConfig::Strict);
    let all = [
        OpsConfig::Strict,
        OpsConfig::Lazy { window_ns: 0 },
        OpsConfig::Lazy { window_ns: u64::MAX - 2 },
        OpsConfig::Auto { threshold: 0 },
        OpsConfig::Auto { threshold: 1 << 20 },
        OpsConfig::Bounce { threshold: 0 },
        OpsConfig::Bounce { threshold: u64::MAX - 1 },
    ];
    for config in all {
        kept.set(config);
        assert_eq!((kept.get(), kept.threshold()), (config, config.threshold()));
        assert_eq!(kept.is_auto(), matches!(config, OpsConfig::Auto { .. }));
    }
    // The largest values are clamped, which nobody can tell.
    for (config, wanted) in [
        (OpsConfig::Bounce { threshold: u64::MAX }, OpsConfig::Bounce { threshold: u64::MAX - 1 }),
        (OpsConfig::Auto { threshold: u64::MAX }, OpsConfig::Auto { threshold: u64::MAX - 1 }),
        (OpsConfig::Lazy { window_ns: u64::MAX }, OpsConfig::Lazy { window_ns: u64::MAX - 2 }),
        (OpsConfig::Lazy { window_ns: u64::MAX - 1 }, OpsConfig::Lazy { window_ns: u64::MAX - 2 }),
    ] {
        kept.set(config);
        assert_eq!(kept.get(), wanted);
    }
}
