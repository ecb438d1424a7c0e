use super::*;

#[test]
fn every_configuration_is_kept_as_it_is() {
    let kept = AtomicConfig::new(OpsConfig::Strict);
    let all = [
        OpsConfig::Strict,
        OpsConfig::Lazy { window_ns: 0 },
        OpsConfig::Lazy { window_ns: u64::MAX },
        OpsConfig::Auto { threshold: 0 },
        OpsConfig::Auto { threshold: 1 << 20 },
        OpsConfig::Bounce { threshold: 0 },
        OpsConfig::Bounce { threshold: (1 << 63) - 2 },
    ];
    for config in all {
        kept.set(config);
        assert_eq!((kept.get(Some(config.policy())), kept.threshold()), (config, config.threshold()));
        assert_eq!(kept.is_auto(), matches!(config, OpsConfig::Auto { .. }));
    }
    // Larger thresholds are clamped, which nobody can tell.
    let threshold = (1 << 63) - 2;
    for (config, wanted) in [
        (OpsConfig::Bounce { threshold: u64::MAX }, OpsConfig::Bounce { threshold }),
        (OpsConfig::Auto { threshold: (1 << 63) - 1 }, OpsConfig::Auto { threshold }),
    ] {
        kept.set(config);
        assert_eq!(kept.get(Some(Policy::Strict)), wanted);
    }
}
