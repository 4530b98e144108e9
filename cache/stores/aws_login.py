"""A login for s3 that boto3 finds: a profile of ~/.aws, single sign-on, or an instance's role."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from penstock.cache.stores.options import StoreOptions


def add_aws_login(options: StoreOptions) -> None:
    """Let boto3, if it is there, find the login and the region: obstore itself knows the
    environment and instances only. Raises ConfigError, MissingDependencyError."""
    config = options.config
    if config.get("skip_signature") or config.get("access_key_id"):
        return
    try:
        import boto3
        import botocore.exceptions
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if options.profile is None:
            return
        raise MissingDependencyError(
            "storage_options: profile= needs boto3: `pip install 'penstock[aws]'`."
        ) from None
    try:
        session = boto3.Session(profile_name=options.profile)
        found = session.get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"storage_options: the AWS profile can't be used ({error}).") from None
    if session.region_name and "region" not in config:
        config["region"] = session.region_name
    if found is not None and found.method != "env":
        config["credential_provider"] = Boto3CredentialProvider(session)
