from .archive_samples import archive_samples as archive_samples
from .member_fields import MemberField as MemberField, RequestedFields as RequestedFields
from .member_fields import member_field as member_field
from .tar_headers import EXTENDED_BYTES as EXTENDED_BYTES, TarMember as TarMember
from .tar_headers import archive_members as archive_members
from .tar_listing import ArchiveJoin as ArchiveJoin
