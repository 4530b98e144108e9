from .archive_samples import MemberField as MemberField, RequestedFields as RequestedFields
from .archive_samples import archive_samples as archive_samples, member_field as member_field
from .tar_headers import EXTENDED_BYTES as EXTENDED_BYTES, TarMember as TarMember
from .tar_headers import archive_members as archive_members
from .tar_listing import join_archives as join_archives
